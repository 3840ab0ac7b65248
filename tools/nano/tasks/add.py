"""Addition of two whole numbers, worked column by column from the right."""

from random import Random

from .task import Task, answer_line

DIGITS = {"easy": (2, 4), "stretch": (5, 8), "hard": (6, 10)}
PROMPTS = ("Add {a} and {b}.", "What is {a} plus {b}?", "Find the sum of {a} and {b}.", "{a} + {b} = ?")


def column_steps(a: int, b: int) -> str:
    """One `digit+digit+carry=total` per column; the shorter number is filled up with zeros."""
    steps, carry = [], 0
    for _ in range(max(len(str(a)), len(str(b)))):
        total = a % 10 + b % 10 + carry
        steps.append(f"{a % 10}+{b % 10}+{carry}={total}")
        a, b, carry = a // 10, b // 10, total // 10
    return "; ".join(steps)


def make(level: str, rng: Random) -> Task:
    shortest, longest = DIGITS[level]
    digits = rng.randint(shortest, longest)
    other_digits = rng.randint(max(shortest, digits - 2), digits)
    numbers = [rng.randrange(10 ** (n - 1), 10**n) for n in (digits, other_digits)]
    rng.shuffle(numbers)
    a, b = numbers
    prompt = rng.choice(PROMPTS).format(a=a, b=b) + "\n"
    final = str(a + b)
    return Task("add", level, prompt, answer_line(final, column_steps(a, b)), final)

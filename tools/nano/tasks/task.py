"""The item that every family produces, and the rule that keeps test prompts out of the training data."""

import hashlib
from dataclasses import dataclass

EASY, STRETCH, HARD = "easy", "stretch", "hard"

# The levels that are measured, and the levels that are trained on with their share. "stretch" overlaps "hard"
# but stops short of its longest items, so that accuracy on "hard" also measures generalisation in length.
TEST_LEVELS = (EASY, HARD)
TRAINING_SHARES = {EASY: 0.7, STRETCH: 0.3}

_TEST_ONE_IN = 16

# A unit test of a `code` item: the arguments of one call and the value it has to return.
UnitTest = tuple[tuple[object, ...], object]


@dataclass(frozen=True, slots=True)
class Task:
    """One item. `answer` is the working and then a line "Answer: {final}"; for `code` it is the source."""

    family: str
    level: str
    prompt: str
    answer: str
    final: str
    tests: tuple[UnitTest, ...] = ()

    @property
    def text(self) -> str:
        """What the model is trained on, without the closing <|endoftext|>."""
        return self.prompt + self.answer


def answer_line(final: str, *working: str) -> str:
    """The worked answer: the lines of working, then the line that is scored."""
    return "\n".join((*working, f"Answer: {final}")) + "\n"


def is_test(prompt: str) -> bool:
    """Whether a prompt belongs to the test split. The prompt alone decides, so no list has to be kept."""
    return hashlib.blake2b(prompt.encode(), digest_size=8).digest()[-1] % _TEST_ONE_IN == 0

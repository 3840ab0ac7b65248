"""People move about, take, drop and hand over things: where is a thing, who has it, where was it before?

The working repeats the sentences that changed the asked thing's holder or place, in order. Whoever takes or
is given a thing stands where the thing is, so the last place in that list is where the thing is now.
"""

from collections.abc import Callable
from random import Random

from .task import Task, answer_line
from .words import CARRIED, NAMES, PLACES

PEOPLE = {"easy": (2, 2), "stretch": (3, 4), "hard": (3, 4)}
THINGS = {"easy": (1, 2), "stretch": (2, 4), "hard": (3, 4)}
EVENTS = {"easy": (3, 6), "stretch": (8, 14), "hard": (10, 18)}
UNMOVED_CHANCE = 0.1  # of keeping a story in which nothing was ever taken: too easy to be asked often
KIND_WEIGHTS = {"go": 4, "take": 8, "give": 6, "drop": 1}
VERBS = {
    "go": ("{who} goes to the {place}.", "{who} walks to the {place}."),
    "take": ("{who} takes the {thing}.", "{who} picks up the {thing}."),
    "give": ("{who} gives the {thing} to {other}.", "{who} hands the {thing} to {other}."),
    "drop": ("{who} drops the {thing}.", "{who} puts down the {thing}."),
}

Event = dict[str, str]


class World:
    """Who and what is where, and for every thing the sentences that moved it."""

    def __init__(self, people: list[str], things: list[str], rng: Random) -> None:
        self.place_of = {name: rng.choice(PLACES) for name in people + things}
        self.holder_of: dict[str, str | None] = dict.fromkeys(things)
        self.seen = {name: {self.place_of[name]} for name in people}
        self.had = {thing: set[str]() for thing in things}
        self.sentences = [f"{name} is in the {self.place_of[name]}." for name in people]
        self.history: dict[str, list[str]] = {}
        self.places: dict[str, list[str]] = {}
        for thing in things:
            sentence = f"The {thing} is in the {self.place_of[thing]}."
            self.sentences.append(sentence)
            self.history[thing], self.places[thing] = [sentence], [self.place_of[thing]]

    def draw_event(self, kind: str, rng: Random) -> Event | None:
        """A random event of one kind, or None if this try found none that the present state allows.

        Nobody returns to a place or gets a thing back: a repeated sentence would make the working ambiguous.
        """
        people, things = list(self.seen), list(self.holder_of)
        who = rng.choice(people)
        if kind == "go":
            place = self.draw_goal(rng)
            return None if place in self.seen[who] else {"who": who, "place": place}
        thing = rng.choice(things)
        holder, here = self.holder_of[thing], self.place_of[thing]
        if kind == "drop":
            return {"who": holder, "thing": thing} if holder else None
        if (kind == "take") == bool(holder) or who in self.had[thing] or self.place_of[who] != here:
            return None
        taken = {"who": who, "thing": thing}
        return {"who": holder, "thing": thing, "other": who} if holder else taken

    def draw_goal(self, rng: Random) -> str:
        """Mostly where a thing or a person is, since aimless walks would seldom lead to a take or a gift."""
        if rng.random() < 0.7:
            return self.place_of[rng.choice(list(self.place_of))]
        return rng.choice(PLACES)

    def happen(self, kind: str, event: Event, sentence: str) -> None:
        """Change the state, and note the sentence with every thing that it moved."""
        self.sentences.append(sentence)
        if kind == "go":
            who, place = event["who"], event["place"]
            self.place_of[who] = place
            self.seen[who].add(place)
            moved = [thing for thing, holder in self.holder_of.items() if holder == who]
            for thing in moved:
                self.place_of[thing] = place
                self.places[thing].append(place)
        else:
            thing = event["thing"]
            holder = {"take": event["who"], "give": event.get("other"), "drop": None}[kind]
            self.holder_of[thing] = holder
            if holder:
                self.had[thing].add(holder)
            moved = [thing]
        for thing in moved:
            self.history[thing].append(sentence)


def play(world: World, events: int, rng: Random) -> None:
    kinds, weights = list(KIND_WEIGHTS), list(KIND_WEIGHTS.values())
    while events:
        kind = rng.choices(kinds, weights)[0]
        event = world.draw_event(kind, rng)
        if event is not None:
            world.happen(kind, event, rng.choice(VERBS[kind]).format(**event))
            events -= 1


def ask(world: World, thing: str, level: str, rng: Random) -> tuple[str, str]:
    """A question about the thing and its answer."""
    questions: list[Callable[[], tuple[str, str]]] = [
        lambda: (f"Where is the {thing}?", world.place_of[thing]),
    ]
    holder = world.holder_of[thing]
    if holder is not None:
        questions.append(lambda: (f"Who has the {thing}?", holder))
    places = world.places[thing]
    if level != "easy" and len(places) > 1:
        questions.append(lambda: (f"Where was the {thing} before the {places[-1]}?", places[-2]))
    return rng.choice(questions)()


def draw_story(level: str, rng: Random) -> tuple[World, str]:
    """A world after its events and the thing to ask for, which is the one that moved most."""
    people = rng.sample(NAMES, rng.randint(*PEOPLE[level]))
    things = rng.sample(CARRIED, rng.randint(*THINGS[level]))
    world = World(people, things, rng)
    play(world, rng.randint(*EVENTS[level]), rng)
    return world, max(things, key=lambda thing: len(world.history[thing]))


def make(level: str, rng: Random) -> Task:
    world, thing = draw_story(level, rng)
    while len(world.history[thing]) == 1 and rng.random() > UNMOVED_CHANCE:
        world, thing = draw_story(level, rng)
    question, final = ask(world, thing, level, rng)
    prompt = " ".join([*world.sentences, question]) + "\n"
    return Task("where", level, prompt, answer_line(final, " ".join(world.history[thing])), final)

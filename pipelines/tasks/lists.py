"""List tasks over three to six short items: sort, reverse, largest and smallest, count, pick, filter, dedupe."""

from __future__ import annotations

import random

from pipelines.tasks.task import Problem
from pipelines.tasks.words import COLOURS, ITEMS, NAMES, form, listed

_LIST = " End with 'Answer: a, b, c'."
_NUMBER = " End with 'Answer: N'."
_ORDINALS = ("first", "second", "third", "fourth", "fifth")


def _words(rng: random.Random, low: int, high: int) -> list[str]:
    """Some distinct words of one sort."""
    return rng.sample(rng.choice((ITEMS, ITEMS, NAMES, COLOURS)), rng.randint(low, high))


def sort_numbers(rng: random.Random) -> Problem:
    numbers, down = rng.sample(range(1, 100), rng.randint(3, 5)), rng.random() < 0.3
    order = sorted(numbers, reverse=down)
    low, high = ("largest", "smallest") if down else ("smallest", "largest")
    prompt = form(
        rng,
        (
            "Sort from {low} to {high}: {items}.",
            "Put these numbers in order, {low} first: {items}.",
            "Write the numbers {items} from the {low} to the {high}.",
        ),
        low=low,
        high=high,
        items=listed(numbers),
    )
    steps = ", then ".join(str(number) for number in order)
    answer = f"The numbers are {listed(numbers)}.\nThe {low} is first: {steps}.\nAnswer: {listed(order)}"
    return Problem((low, *numbers), prompt + _LIST, answer, [str(number) for number in order])


def sort_words(rng: random.Random) -> Problem:
    words = _words(rng, 3, 4)
    order = sorted(words)
    prompt = form(
        rng,
        (
            "Sort these words by the alphabet: {items}.",
            "Put in alphabetical order: {items}.",
            "Write {items} in alphabetical order.",
        ),
        items=listed(words),
    )
    steps = ", ".join(f"{word[0].upper()} for {word}" for word in order)
    answer = f"The words are {listed(words)}.\nIn order: {steps}.\nAnswer: {listed(order)}"
    return Problem(tuple(words), prompt + _LIST, answer, order)


def reverse(rng: random.Random) -> Problem:
    words = _words(rng, 3, 6)
    back = words[::-1]
    prompt = form(
        rng,
        (
            "Reverse this list: {items}.",
            "Write the list backwards: {items}.",
            "Here is a list: {items}. Give it from last to first.",
        ),
        items=listed(words),
    )
    ends = f"The last item is {back[0]}, the first is {words[0]}."
    answer = f"The list is {listed(words)}.\n{ends}\nAnswer: {listed(back)}"
    return Problem(tuple(words), prompt + _LIST, answer, back)


def extreme(rng: random.Random) -> Problem:
    numbers, word = rng.sample(range(1, 100), rng.randint(3, 5)), rng.choice(("largest", "smallest"))
    best = max(numbers) if word == "largest" else min(numbers)
    prompt = form(
        rng,
        (
            "Which is the {word} of {items}?",
            "Find the {word} number: {items}.",
            "{name} writes {items}. What is the {word} of these?",
        ),
        word=word,
        items=listed(numbers),
        name=rng.choice(NAMES),
    )
    answer = f"The numbers are {listed(numbers)}.\nThe {word} number is {best}.\nAnswer: {best}"
    return Problem((word, *numbers), prompt + _NUMBER, answer, best)


def count(rng: random.Random) -> Problem:
    words = _words(rng, 3, 7)
    prompt = form(
        rng,
        (
            "How many items are in this list: {items}?",
            "Count the words: {items}.",
            "{items}: how many are these?",
        ),
        items=listed(words),
    )
    lines = "".join(f"{index}. {word}\n" for index, word in enumerate(words, 1))
    return Problem(tuple(words), prompt + _NUMBER, f"{lines}Answer: {len(words)}", len(words))


def pick(rng: random.Random) -> Problem:
    words = _words(rng, 3, 5)
    place = rng.randrange(len(words))
    prompt = form(
        rng,
        (
            "What is the {nth} item of {items}?",
            "Name the {nth} word in this list: {items}.",
            "Here is a list: {items}. Which one is {nth}?",
        ),
        nth=_ORDINALS[place],
        items=listed(words),
    )
    lines = "".join(f"{index}. {word}\n" for index, word in enumerate(words, 1))
    answer = f"{lines}Number {place + 1} is {words[place]}.\nAnswer: {words[place]}"
    return Problem((place, *words), prompt + " End with 'Answer: word'.", answer, words[place])


def dedupe(rng: random.Random) -> Problem:
    kept = _words(rng, 2, 4)
    again = rng.choice(kept)
    words = list(kept)
    words.insert(rng.randint(kept.index(again) + 1, len(kept)), again)
    prompt = form(
        rng,
        (
            "Remove the repeated word: {items}.",
            "Write this list without repeats: {items}.",
            "Keep each word once, in the same order: {items}.",
        ),
        items=listed(words),
    )
    answer = f"The list is {listed(words)}.\nThe word {again} is there twice.\nAnswer: {listed(kept)}"
    return Problem(tuple(words), prompt + _LIST, answer, kept)


def above(rng: random.Random) -> Problem:
    numbers, limit = rng.sample(range(1, 100), rng.randint(3, 5)), 10 * rng.randint(2, 7)
    numbers = [number + (number == limit) for number in numbers]
    if max(numbers) < limit:
        numbers[rng.randrange(len(numbers))] = rng.randint(limit + 1, 99)
    kept = [number for number in numbers if number > limit]
    prompt = form(
        rng,
        (
            "Which of these numbers are greater than {limit}: {items}?",
            "Keep the numbers above {limit}: {items}.",
            "From {items}, list those that are more than {limit}.",
        ),
        limit=limit,
        items=listed(numbers),
    )
    lines = "".join(f"{number} > {limit}: {'yes' if number > limit else 'no'}\n" for number in numbers)
    answer = f"{lines}Answer: {listed(kept)}"
    return Problem((limit, *numbers), prompt + _LIST, answer, [str(number) for number in kept])

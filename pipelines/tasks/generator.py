"""The registry of kinds and the seeded walk through their problems."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from model.config import nearest_key
from model.errors import UserError
from pipelines.tasks import check, dates, lists, problems, strings, structured
from pipelines.tasks.task import Kind, Task, split_of

SPLITS = ("train", "held_out")
DRAWS = 20_011  # problems drawn per kind; prime, so that any stride visits all

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("word_add", problems.add, check.number),
        Kind("word_subtract", problems.subtract, check.number),
        Kind("word_multiply", problems.multiply, check.number),
        Kind("word_share", problems.share, check.number),
        Kind("word_two_steps", problems.two_steps, check.number),
        Kind("word_total_price", problems.total_price, check.number),
        Kind("list_sort_numbers", lists.sort_numbers, check.items),
        Kind("list_sort_words", lists.sort_words, check.items),
        Kind("list_reverse", lists.reverse, check.items),
        Kind("list_extreme", lists.extreme, check.number),
        Kind("list_count", lists.count, check.number),
        Kind("list_pick", lists.pick, check.same_text),
        Kind("list_dedupe", lists.dedupe, check.items),
        Kind("list_above", lists.above, check.items),
        Kind("string_reverse", strings.reverse, check.letters),
        Kind("string_uppercase", strings.uppercase, check.exact),
        Kind("string_count_letter", strings.count_letter, check.number),
        Kind("string_first_letters", strings.first_letters, check.letters),
        Kind("string_join", strings.join, check.same_text),
        Kind("date_iso", dates.iso_date, check.same_text),
        Kind("date_weekday", dates.weekday, check.same_text),
        Kind("date_days_later", dates.days_later, check.same_text),
        Kind("time_hours_later", dates.hours_later, check.same_text),
        Kind("unit_convert", dates.convert, check.number),
        Kind("json_person", structured.json_person, check.json_object),
        Kind("json_order", structured.json_order, check.json_object),
        Kind("json_trip", structured.json_trip, check.json_object),
        Kind("lines_event", structured.lines_event, check.key_values),
        Kind("lines_product", structured.lines_product, check.key_values),
        Kind("csv_person", structured.csv_person, check.csv_line),
        Kind("csv_sale", structured.csv_sale, check.csv_line),
    )
}


def generate(
    split: str, count: int, seed: int, *, kinds: Sequence[Kind] = tuple(KINDS.values()), draws: int = DRAWS
) -> Iterator[Task]:
    """`count` distinct tasks of a split, the kinds taking turns; a larger count only adds tasks at the end.

    split: "train" or "held_out". Raises UserError for another split, a count below 1, and (when the tasks run out)
    a count beyond the number of distinct problems.
    """
    if split not in SPLITS:
        raise UserError(f"The split of the generated tasks must be one of {', '.join(SPLITS)}, not {split!r}.")
    if not 1 <= count <= len(kinds) * draws:
        raise UserError(f"The count of generated tasks must be from 1 to {len(kinds) * draws}, not {count}.")
    return _take(split, count, seed, kinds, draws)


def kinds_named(names: Sequence[str]) -> tuple[Kind, ...]:
    """The kinds of these names, in the registry's order; all of them without a name. Raises UserError for others."""
    for name in names:
        if name not in KINDS:
            raise UserError(f"{name!r} is no kind of the generated tasks: {nearest_key(name, KINDS)}")
    return tuple(kind for kind in KINDS.values() if not names or kind.name in names)


def _take(split: str, count: int, seed: int, kinds: Sequence[Kind], draws: int) -> Iterator[Task]:
    rng = random.Random(f"order {seed}")
    walks = {kind.name: _walk(kind, split, seed, draws) for kind in kinds}
    given = 0
    while walks:
        for name in rng.sample(sorted(walks), len(walks)):
            task = next(walks[name], None)
            if task is None:
                del walks[name]
                continue
            yield task
            given += 1
            if given == count:
                return
    raise UserError(f"There are only {given} distinct {split} tasks, {count} were asked for: ask for at most {given}.")


def _walk(kind: Kind, split: str, seed: int, draws: int) -> Iterator[Task]:
    """All distinct tasks of one kind in a split, in the seed's order."""
    rng = random.Random(f"walk {kind.name} {seed}")
    start, stride = rng.randrange(draws), rng.randrange(1, draws)
    seen: set[tuple[object, ...]] = set()
    for step in range(draws):
        draw = (start + step * stride) % draws
        problem = kind.make(random.Random(f"{kind.name} {draw}"))
        if problem.key not in seen and split_of(kind.name, problem.key) == split:
            seen.add(problem.key)
            yield kind.task(problem)

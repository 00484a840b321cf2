"""Dates, times of day and units: whole numbers, inside one month and one day."""

from __future__ import annotations

import random

from pipelines.tasks.task import Problem
from pipelines.tasks.words import EVENTS, MONTHS, WEEKDAYS, form

_UNITS = (  # from, to, factor, largest count
    ("meters", "centimeters", 100, 99),
    ("kilometers", "meters", 1000, 99),
    ("kilograms", "grams", 1000, 99),
    ("liters", "milliliters", 1000, 99),
    ("centimeters", "millimeters", 10, 99),
    ("dollars", "cents", 100, 99),
    ("weeks", "days", 7, 10),
    ("hours", "minutes", 60, 10),
    ("minutes", "seconds", 60, 10),
    ("dozens", "pieces", 12, 10),
    ("years", "months", 12, 10),
    ("days", "hours", 24, 5),
    ("feet", "inches", 12, 10),
    ("yards", "feet", 3, 30),
)


def iso_date(rng: random.Random) -> Problem:
    year, month, day = rng.randint(1950, 2049), rng.randint(1, 12), rng.randint(1, 28)
    given = rng.choice(("{month} {day}, {year}", "{day} {month} {year}")).format(
        month=MONTHS[month - 1], day=day, year=year
    )
    prompt = form(
        rng,
        (
            "Write the date {given} as YYYY-MM-DD.",
            "Change {given} to the form YYYY-MM-DD.",
            "What is {given} in the form YYYY-MM-DD?",
        ),
        given=given,
    )
    iso = f"{year}-{month:02}-{day:02}"
    answer = f"The year is {year}.\n{MONTHS[month - 1]} is month {month:02}.\nThe day is {day:02}.\nAnswer: {iso}"
    return Problem((year, month, day), prompt + " End with 'Answer: date'.", answer, iso)


def weekday(rng: random.Random) -> Problem:
    month, day = rng.choice(MONTHS), rng.randint(1, 22)
    start, days = rng.randrange(7), rng.randint(1, 5)
    prompt = form(
        rng,
        (
            "{month} {day} is a {start}. Which weekday is {month} {end}?",
            "If {month} {day} is a {start}, what day of the week is {month} {end}?",
            "The {event} is on {start}, {month} {day}. What weekday is {month} {end}?",
        ),
        month=month,
        day=day,
        end=day + days,
        start=WEEKDAYS[start],
        event=rng.choice(EVENTS),
    )
    names = [WEEKDAYS[(start + step) % 7] for step in range(days + 1)]
    lines = "".join(f"{month} {day + step}: {name}\n" for step, name in enumerate(names))
    answer = f"{lines}Answer: {names[-1]}"
    return Problem((month, day, start, days), prompt + " End with 'Answer: weekday'.", answer, names[-1])


def days_later(rng: random.Random) -> Problem:
    month, day = rng.choice(MONTHS), rng.randint(1, 18)
    days = rng.randint(2, 28 - day)
    prompt = form(
        rng,
        (
            "The {event} on {month} {day} is moved by {days} days. What is the new date?",
            "What date is {days} days after {month} {day}?",
            "A trip starts on {month} {day}. It ends {days} days later. On which date?",
        ),
        event=rng.choice(EVENTS),
        month=month,
        day=day,
        days=days,
    )
    answer = (
        f"The month is {month}.\nStart at day {day} and add {days} days.\n"
        f"{day} + {days} = {day + days}\nAnswer: {month} {day + days}"
    )
    return Problem((month, day, days), prompt + " End with 'Answer: Month day'.", answer, f"{month} {day + days}")


def hours_later(rng: random.Random) -> Problem:
    hour, minute = rng.randint(6, 20), 5 * rng.randint(0, 11)
    hours = rng.randint(1, min(23 - hour, 8))
    prompt = form(
        rng,
        (
            "The {event} starts at {hour}:{minute:02} and lasts {hours} hours. When does it end?",
            "It is {hour}:{minute:02}. What time is it {hours} hours later?",
            "A train leaves at {hour}:{minute:02} and arrives after {hours} hours. When does it arrive?",
        ),
        event=rng.choice(EVENTS),
        hour=hour,
        minute=minute,
        hours=hours,
    )
    end = f"{hour + hours}:{minute:02}"
    answer = f"The hour is {hour}, the minutes are {minute:02}.\n{hour} + {hours} = {hour + hours}\nAnswer: {end}"
    return Problem((hour, minute, hours), prompt + " End with 'Answer: H:MM'.", answer, end)


def convert(rng: random.Random) -> Problem:
    source, target, factor, most = rng.choice(_UNITS)
    amount = rng.randint(2, most)
    prompt = form(
        rng,
        (
            "How many {target} are {amount} {source}?",
            "Change {amount} {source} to {target}.",
            "Convert {amount} {source} into {target}.",
        ),
        target=target,
        amount=amount,
        source=source,
    )
    total = amount * factor
    answer = (
        f"One of the {source} is {factor} {target}.\n{amount} x {factor} = {total}\n"
        f"{amount} {source} are {total} {target}.\nAnswer: {total}"
    )
    return Problem((amount, source, target), prompt + " End with 'Answer: N'.", answer, total)

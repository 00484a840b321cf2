"""Short structured answers from a sentence: a JSON object, `Key: value` lines, a CSV header and its line."""

from __future__ import annotations

import json
import random
from typing import Any

from pipelines.tasks.task import Problem
from pipelines.tasks.words import CITIES, COLOURS, EVENTS, GOODS, JOBS, MONTHS, NAMES, WEEKDAYS, article, form


def _object(prompt: str, fields: dict[str, Any]) -> Problem:
    keys = ", ".join(fields)
    return Problem(tuple(fields.values()), f"{prompt} Give JSON with {keys}.", json.dumps(fields), fields)


def _lines(prompt: str, fields: dict[str, str]) -> Problem:
    keys = ", ".join(fields)
    answer = "\n".join(f"{key}: {value}" for key, value in fields.items())
    return Problem(tuple(fields.values()), f"{prompt} Write lines 'Key: value' for {keys}.", answer, fields)


def _row(prompt: str, fields: dict[str, str]) -> Problem:
    keys = ",".join(fields)
    values = list(fields.values())
    answer = f"{keys}\n{','.join(values)}"
    return Problem(tuple(values), f"{prompt} Write CSV with a header line: {keys}.", answer, values)


def json_person(rng: random.Random) -> Problem:
    fields = {
        "name": rng.choice(NAMES),
        "age": rng.randint(18, 80),
        "job": rng.choice(JOBS),
        "city": rng.choice(CITIES),
    }
    templates = (
        "{name} is {age} years old, works as {a} {job} and lives in {city}.",
        "{name}, {age}, is {a} {job} in {city}.",
        "In {city} there is {a} {job} called {name}, aged {age}.",
    )
    return _object(form(rng, templates, a=article(str(fields["job"])), **fields), fields)


def json_order(rng: random.Random) -> Problem:
    fields = {
        "customer": rng.choice(NAMES),
        "item": rng.choice(GOODS),
        "color": rng.choice(COLOURS),
        "price": rng.randint(3, 99),
    }
    templates = (
        "{customer} ordered the {color} {item} for {price} dollars.",
        "The {color} {item} was sold to {customer} for ${price}.",
        "{customer} pays {price} dollars for one {item}, color {color}.",
    )
    return _object(form(rng, templates, **fields), fields)


def json_trip(rng: random.Random) -> Problem:
    start, end = rng.sample(CITIES, 2)
    fields = {"from": start, "to": end, "day": rng.choice(WEEKDAYS), "seats": rng.randint(1, 9)}
    templates = (
        "Book {seats} seats from {from} to {to} on {day}.",
        "On {day} we travel from {from} to {to} and need {seats} seats.",
        "{seats} seats please, {day}, from {from} to {to}.",
    )
    return _object(form(rng, templates, **fields), fields)


def lines_event(rng: random.Random) -> Problem:
    fields = {
        "Event": rng.choice(EVENTS),
        "Place": rng.choice(CITIES),
        "Day": rng.choice(WEEKDAYS),
        "Host": rng.choice(NAMES),
    }
    templates = (
        "{Host} hosts the {Event} in {Place} on {Day}.",
        "On {Day} there is the {Event} in {Place}, hosted by {Host}.",
        "The {Event} in {Place} is on {Day}; the host is {Host}.",
    )
    return _lines(form(rng, templates, **fields), fields)


def lines_product(rng: random.Random) -> Problem:
    fields = {
        "Product": rng.choice(GOODS),
        "Color": rng.choice(COLOURS),
        "Price": str(rng.randint(3, 99)),
        "Stock": str(rng.randint(1, 60)),
    }
    templates = (
        "We have {Stock} pieces of the {Color} {Product} at {Price} dollars.",
        "The {Product} is {Color}, costs {Price} dollars, and {Stock} are in stock.",
        "In stock: {Stock}. It is the {Color} {Product} for {Price} dollars.",
    )
    return _lines(form(rng, templates, **fields), fields)


def csv_person(rng: random.Random) -> Problem:
    month, day = rng.choice(MONTHS), rng.randint(1, 28)
    fields = {
        "name": rng.choice(NAMES),
        "job": rng.choice(JOBS),
        "city": rng.choice(CITIES),
        "birthday": f"{month} {day}",
    }
    templates = (
        "{name} from {city} is {a} {job}, born on {birthday}.",
        "Born on {birthday}, {name} works in {city} as {a} {job}.",
        "The {job} {name} lives in {city} and was born on {birthday}.",
    )
    return _row(form(rng, templates, a=article(fields["job"]), **fields), fields)


def csv_sale(rng: random.Random) -> Problem:
    fields = {
        "day": rng.choice(WEEKDAYS),
        "item": rng.choice(GOODS),
        "count": str(rng.randint(2, 30)),
        "buyer": rng.choice(NAMES),
        "city": rng.choice(CITIES),
    }
    templates = (
        "On {day}, {buyer} from {city} bought {item}, {count} pieces.",
        "{buyer} in {city} ordered {count} pieces of item {item} on {day}.",
        "Sold on {day}: {item}, {count} pieces, to {buyer} of {city}.",
    )
    return _row(form(rng, templates, **fields), fields)

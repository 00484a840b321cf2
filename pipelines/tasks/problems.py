"""Word problems with small numbers: one step, and one kind of two steps."""

from __future__ import annotations

import random

from pipelines.tasks.task import Problem
from pipelines.tasks.words import GOODS, NAMES, THINGS, form

_END = " End with 'Answer: N'."


def add(rng: random.Random) -> Problem:
    name, things, a, b = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 40), rng.randint(2, 20)
    prompt = form(
        rng,
        (
            "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
            "{name} found {a} {things} on one day and {b} on the next. How many {things} is that in all?",
            "There are {a} {things} in one room and {b} in another. How many {things} are there together?",
            "{name} counts {a} {things}, then {b} more {things}. What is the total?",
        ),
        name=name,
        things=things,
        a=a,
        b=b,
    )
    answer = f"We have {a} {things} and {b} more {things}.\n{a} + {b} = {a + b}\nAnswer: {a + b}"
    return Problem((a, b, things), prompt + _END, answer, a + b)


def subtract(rng: random.Random) -> Problem:
    name, things, a = rng.choice(NAMES), rng.choice(THINGS), rng.randint(8, 40)
    b = rng.randint(2, min(a - 1, 20))
    prompt = form(
        rng,
        (
            "{name} has {a} {things} and gives away {b}. How many {things} are left?",
            "{name} had {a} {things} but lost {b} of them. How many {things} remain?",
            "A shop has {a} {things} and sells {b}. How many {things} does it still have?",
            "Of {a} {things}, {name} uses {b}. How many {things} are not used?",
        ),
        name=name,
        things=things,
        a=a,
        b=b,
    )
    answer = f"We have {a} {things} and take away {b} {things}.\n{a} - {b} = {a - b}\nAnswer: {a - b}"
    return Problem((a, b, things), prompt + _END, answer, a - b)


def multiply(rng: random.Random) -> Problem:
    name, things, a, b = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 10), rng.randint(2, 10)
    prompt = form(
        rng,
        (
            "{name} fills {a} bags with {b} {things} each. How many {things} is that?",
            "There are {a} shelves with {b} {things} on each. How many {things} are there?",
            "{name} buys {b} {things} a day for {a} days. How many {things} in all?",
            "Each of {a} children has {b} {things}. How many {things} do they have together?",
        ),
        name=name,
        things=things,
        a=a,
        b=b,
    )
    answer = f"There are {a} groups of {b} {things}.\n{a} x {b} = {a * b}\nAnswer: {a * b}"
    return Problem((a, b, things), prompt + _END, answer, a * b)


def share(rng: random.Random) -> Problem:
    name, things, a, b = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 6), rng.randint(2, 10)
    prompt = form(
        rng,
        (
            "{name} shares {total} {things} equally among {a} friends. How many {things} does each get?",
            "{total} {things} are put into {a} equal piles. How many {things} are in one pile?",
            "{name} packs {total} {things} into {a} boxes, the same in each. How many {things} per box?",
        ),
        name=name,
        things=things,
        total=a * b,
        a=a,
    )
    answer = f"We split {a * b} {things} into {a} equal parts.\n{a * b} / {a} = {b}\nAnswer: {b}"
    return Problem((a * b, a, things), prompt + _END, answer, b)


def two_steps(rng: random.Random) -> Problem:
    name, things, a, b = rng.choice(NAMES), rng.choice(THINGS), rng.randint(5, 30), rng.randint(2, 20)
    c = rng.randint(2, min(a + b - 1, 15))
    prompt = form(
        rng,
        (
            "{name} has {a} {things}, buys {b} more and gives {c} away. How many {things} are left?",
            "{name} starts with {a} {things}, finds {b} and loses {c}. How many {things} are there in the end?",
            "A box holds {a} {things}. {name} adds {b} and takes out {c}. How many {things} are in the box?",
        ),
        name=name,
        things=things,
        a=a,
        b=b,
        c=c,
    )
    answer = (
        f"Start with {a} {things}.\nAdd {b}: {a} + {b} = {a + b}\n"
        f"Take away {c}: {a + b} - {c} = {a + b - c}\nAnswer: {a + b - c}"
    )
    return Problem((a, b, c, things), prompt + _END, answer, a + b - c)


def total_price(rng: random.Random) -> Problem:
    first, second = rng.sample(GOODS, 2)
    p, q = rng.randint(2, 40), rng.randint(2, 20)
    prompt = form(
        rng,
        (
            "One {first} costs ${p} and one {second} costs ${q}. What is the price of both?",
            "{name} buys one {first} for ${p} and one {second} for ${q}. How many dollars is that?",
            "The {first} is ${p}, the {second} is ${q}. What do they cost together?",
        ),
        first=first,
        second=second,
        p=p,
        q=q,
        name=rng.choice(NAMES),
    )
    answer = f"{first}: ${p}\n{second}: ${q}\nTotal: {p} + {q} = {p + q}\nAnswer: {p + q}"
    return Problem((first, p, second, q), prompt + _END, answer, p + q)

"""The nouns the tasks are about. Short, common words: most are one token in most vocabularies."""

from __future__ import annotations

import random


def _split(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.replace("\n", " ").split(","))


NAMES = _split(
    """Ana, Ben, Carl, Dora, Emma, Finn, Grace, Hugo, Ida, Jack, Kate, Leo, Maria, Noah, Olga, Paul, Rosa, Sam, Tom,
    Vera, Will, Zoe, Alice, Bruno, Clara, David, Elena, Frank, Helen, Ivan, Julia, Kevin, Laura, Mark, Nina, Oscar,
    Peter, Ruth, Sarah, Victor"""
)
CITIES = _split(
    """Paris, Rome, Berlin, Madrid, London, Vienna, Oslo, Lima, Cairo, Tokyo, Delhi, Boston, Chicago, Dublin, Prague,
    Athens, Lisbon, Moscow, Toronto, Sydney, Geneva, Munich, Seoul, Denver, Miami, Dallas, Milan, Warsaw, Havana,
    Kyoto"""
)
THINGS = _split(
    """apples, books, cards, coins, eggs, pens, shells, stamps, toys, balls, cups, plates, stones, tickets, keys, hats,
    lemons, flowers, boxes, bottles, candles, cookies, marbles, stickers, letters, photos, ribbons, buttons, pears,
    oranges"""
)
GOODS = _split(
    """lamp, book, chair, shirt, hat, bag, clock, cup, knife, pan, table, rug, phone, radio, coat, belt, ball, kite,
    drum, map, mirror, pillow, bowl, scarf, towel, brush, basket, ring, vase, umbrella"""
)
ITEMS = _split(
    """apple, bread, cat, dog, egg, fish, gold, hat, ice, jam, key, lamp, milk, nest, oil, pen, queen, rose, salt, tree,
    vase, wolf, zebra, bear, cake, desk, door, fork, goat, hill, iron, king, lake, moon, nut, owl, pear, rice, ship,
    star, tent, wind, arm, bell, corn, duck, farm, game, hand, leaf, map, note, park, ring, sand, town, wall, yard"""
)
JOBS = _split(
    """teacher, doctor, nurse, pilot, farmer, baker, lawyer, writer, singer, driver, painter, engineer, chef, judge,
    tailor, dentist, actor, banker, plumber, gardener"""
)
COLOURS = _split("red, blue, green, black, white, brown, pink, grey, yellow, orange, purple, silver")
EVENTS = _split(
    "meeting, concert, picnic, party, lecture, wedding, race, exam, workshop, play, dinner, game, fair, parade, class"
)
WEEKDAYS = _split("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")
MONTHS = _split("January, February, March, April, May, June, July, August, September, October, November, December")


def listed(items: list[str] | list[int]) -> str:
    """`a, b, c`."""
    return ", ".join(str(item) for item in items)


def article(noun: str) -> str:
    """`a` or `an`."""
    return "an" if noun[0].lower() in "aeiou" else "a"


def form(rng: random.Random, templates: tuple[str, ...], **fields: object) -> str:
    """One of the wordings, filled in."""
    return rng.choice(templates).format(**fields)

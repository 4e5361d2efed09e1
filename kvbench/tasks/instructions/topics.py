"""Questions: short lists of common knowledge, in five languages."""

import re
import unicodedata
from dataclasses import dataclass

LANGUAGES = ("English", "French", "German", "Spanish", "Italian")


@dataclass(frozen=True)
class Topic:
    """A question whose answer is a list: language -> the items, in the same order in each."""

    question: str
    items: dict[str, tuple[str, ...]]


def _topic(question: str, *lists: str) -> Topic:
    return Topic(question, {name: tuple(text.split()) for name, text in zip(LANGUAGES, lists, strict=True)})


TOPICS = {
    "days": _topic(
        "Name the seven days of the week.",
        "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
        "lundi mardi mercredi jeudi vendredi samedi dimanche",
        "Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag",
        "lunes martes miércoles jueves viernes sábado domingo",
        "lunedì martedì mercoledì giovedì venerdì sabato domenica",
    ),
    "months": _topic(
        "Name the twelve months of the year.",
        "January February March April May June July August September October November December",
        "janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
        "Januar Februar März April Mai Juni Juli August September Oktober November Dezember",
        "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre",
        "gennaio febbraio marzo aprile maggio giugno luglio agosto settembre ottobre novembre dicembre",
    ),
    "seasons": _topic(
        "Name the four seasons of the year.",
        "spring summer autumn winter",
        "printemps été automne hiver",
        "Frühling Sommer Herbst Winter",
        "primavera verano otoño invierno",
        "primavera estate autunno inverno",
    ),
    "numbers": _topic(
        "Count from one to ten, in words.",
        "one two three four five six seven eight nine ten",
        "un deux trois quatre cinq six sept huit neuf dix",
        "eins zwei drei vier fünf sechs sieben acht neun zehn",
        "uno dos tres cuatro cinco seis siete ocho nueve diez",
        "uno due tre quattro cinque sei sette otto nove dieci",
    ),
    "directions": _topic(
        "Name the four points of the compass.",
        "north east south west",
        "nord est sud ouest",
        "Norden Osten Süden Westen",
        "norte este sur oeste",
        "nord est sud ovest",
    ),
    "colours": _topic(
        "Name six colours of the rainbow.",
        "red orange yellow green blue violet",
        "rouge orange jaune vert bleu violet",
        "rot orange gelb grün blau violett",
        "rojo naranja amarillo verde azul violeta",
        "rosso arancione giallo verde blu viola",
    ),
}


def plain(text: str) -> str:
    """A text without case and accents, so that `Fevrier` is février."""
    split = unicodedata.normalize("NFKD", text.casefold())
    return "".join(sign for sign in split if not unicodedata.combining(sign))


def named(items: tuple[str, ...], answer: str) -> float:
    """The share of items that stand in an answer as words, whatever case and accents."""
    words = set(re.findall(r"\w+", plain(answer)))
    return sum(plain(item) in words for item in items) / len(items)

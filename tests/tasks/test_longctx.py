"""The generated tasks: same seed, same prompts; lengths; answers that are there once; scores."""

import re
from random import Random

import pytest
from loaded import loader
from refusals import refused

from kvbench.tasks import fill, haystack, load_task, longctx
from kvbench.tasks.longctx import generate

KINDS = generate.KINDS


def docs(tokenizer, kind: str, num_items: int = 4, length: int = 700, seed: int = 0) -> list[dict]:
    """The first documents of a kind."""
    return [generate.make_doc(kind, place, tokenizer=tokenizer, length=length, seed=seed) for place in range(num_items)]


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [600, 777, 2500])
def test_prompts_are_as_long_as_asked(tokenizer, kind: str, length: int) -> None:
    """Never longer than asked, and short of it by a few tokens at most: by a row of the table for kv."""
    slack = 40 if kind == "kv" else 12
    for doc in docs(tokenizer, kind, length=length):
        assert length - slack <= len(tokenizer(doc["context"] + doc["question"]).input_ids) <= length


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides(tokenizer, kind: str) -> None:
    """The same seed gives the same documents, another seed others, and no document depends on how many there are."""
    first = docs(tokenizer, kind, num_items=3)
    assert docs(tokenizer, kind, num_items=2) == first[:2]
    other = docs(tokenizer, kind, num_items=2, seed=1)
    assert not {doc["sha256"] for doc in first} & {doc["sha256"] for doc in other}
    assert len({doc["sha256"] for doc in first}) == len(first)


@pytest.mark.parametrize("kind", ["multikey", "passkey"])
def test_facts_do_not_depend_on_the_length(tokenizer, kind: str) -> None:
    """The same item at another length asks for the same fact: lengths can be compared item by item."""
    short, long = docs(tokenizer, kind, length=600), docs(tokenizer, kind, length=1500)
    assert [(doc["question"], doc["answer"]) for doc in short] == [(doc["question"], doc["answer"]) for doc in long]


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_is_in_the_context_once(tokenizer, kind: str) -> None:
    """The fact asked for stands in the context exactly once, and not in the question."""
    for doc in docs(tokenizer, kind, num_items=6, length=1200):
        leads = {"multikey": doc["question"].rpartition("Answer: ")[2], "passkey": "The pass key is"}
        lead = leads.get(kind, doc["question"].strip())
        assert doc["context"].count(lead + doc["answer"]) == doc["context"].count(lead) == 1
        assert doc["answer"] not in doc["question"]
        if kind == "recall":  # as long as the answer, so that they can be compared word by word
            assert len(tokenizer.encode(doc["answer"], add_special_tokens=False)) == generate.RECALL_TOKENS


def test_multikey_has_eight_needles_with_different_answers(tokenizer) -> None:
    """Seven needles are of the same form as the one asked for, with other cities and other numbers."""
    for doc in docs(tokenizer, "multikey"):
        needles = re.findall(r"The special number of (\w+) is (\d{7})\.", doc["context"])
        assert len(needles) == len({city for city, _ in needles}) == len({number for _, number in needles}) == 8


def test_depths_cover_the_document(tokenizer) -> None:
    """The answers of eight items lie all over the document, where the depth says."""
    seen = []
    for doc in docs(tokenizer, "passkey", num_items=8, length=1500):
        place = doc["context"].index("The pass key is") / len(doc["context"])
        assert abs(place - doc["depth"]) < 0.12  # needles go between sentences
        seen.append(place)
    assert min(seen) < 0.2 and max(seen) > 0.8


def test_kv_keys_are_unique_even_in_long_tables(tokenizer) -> None:
    """When the words run out, keys get a number."""
    context = docs(tokenizer, "kv", num_items=1, length=40_000)[0]["context"]
    keys = [line.partition(":")[0] for line in context.split("\n")[2:]]
    assert len(keys) > len(generate.ADJECTIVES) * len(generate.NOUNS)
    assert len(set(keys)) == len(keys)


def test_filler_longer_than_the_documentation(tokenizer) -> None:
    """Paragraphs come again in another order when there are not enough of them."""
    num_words = sum(len(text.split()) for text in haystack.paragraphs()) + 500
    filler = haystack.make_filler(Random(0), num_words)
    assert len(filler.words) >= num_words
    assert filler.render(0, [(0.5, "Needle.")]) == "Needle."


def test_inserts_go_between_sentences() -> None:
    """An insert stands behind a full stop, at the sentence end next to its depth."""
    filler = haystack.Filler(("a", "b.", "c", "d", "e.", "f"), (2, 5))
    assert filler.render(6, [(0.4, "X."), (0.9, "Y.")]) == "a b. X. c d e. Y. f"
    assert filler.render(6, [(0.0, "X.")]) == "X. a b. c d e. f"


def test_fill_length_against_counting_up(tokenizer) -> None:
    """The search ends at the largest number of units, or a few tokens short of it, whatever the units' lengths."""
    rng = Random(3)
    units = ["word " * rng.choice([1, 1, 2, 9]) for _ in range(300)]

    counts = [len(tokenizer.encode("".join(units[:n]))) for n in range(301)]
    for length in (1, 2, 17, 100, 333, 5000):
        best = max(n for n in range(301) if counts[n] <= length)
        found = fill.fill_length(counts.__getitem__, length, 300)
        assert found <= best
        assert found == best or length - counts[found] <= fill.LENGTH_SLACK_TOKENS
    for guess in (None, 0, 3, 90, 5000):  # where the search looks first changes nothing of what it finds
        assert fill.fill_length(lambda n: 10 + 7 * n, 500, 1000, least=1, guess=guess) == 70
    with refused("setting-value", "task.length", "17 tokens"):
        fill.fill_length(lambda n: 10 + 7 * n, 12, 1000, least=1)


def test_a_length_that_is_too_short_names_the_largest_need(tiny_model) -> None:
    """With several kinds the message says what the neediest of them takes, so that one change is enough."""
    loaded, needs = tiny_model("llama", "gqa3", 64), {}
    settings = {"name": "longctx", "length": 256, "items": 2}
    for kind in KINDS:
        try:
            load_task(settings | {"kinds": [kind]}, loaded, limit=None, seed=0)
        except fill.TooShort as error:
            needs[kind] = error.needed
    with refused("setting-value", "task.length", "task.length=256", f"{max(needs.values())} tokens"):
        load_task(settings, loaded, limit=None, seed=0)
    assert len(set(needs.values())) > 1, needs


def test_number_score() -> None:
    """The first number of the answer counts: as a whole, and by its digits, by hand."""
    for answer, expected, partial in (
        (" 4821.", 1, 1),
        ("4,821", 1, 1),
        ("is 4821 or 17", 1, 1),
        ("17 or 4821", 0, 0),
        ("48211", 0, 4 / 5),  # a digit too many is a digit wrong
        ("482", 0, 3 / 4),
        ("4871", 0, 3 / 4),
        ("8421", 0, 2 / 4),  # in its place, or it does not count
        ("", 0, 0),
    ):
        found = longctx.number_score(answer, " 4821")
        assert found == {"score": expected, "exact": expected, "partial": partial}, answer


def test_recall_score() -> None:
    """F1 of the longest common subsequence of words, by hand."""
    for answer, score, exact in (
        ("the  big\nred box ", 1, 1),
        ("the red box", 6 / 7, 0),  # 3 common of 3 + 4
        ("box red big the", 1 / 4, 0),  # order counts
        ("", 0, 0),
        ("The big red box", 3 / 4, 0),
    ):
        found = longctx.recall_score(answer, " the big red box")
        assert found == pytest.approx({"score": score, "exact": exact, "partial": score}), answer


load = loader("longctx", length=600, items=2)


def test_the_task_set(model, tokenizer) -> None:
    """Ids, subsets, gold tokens and scores fit together; the reference answer scores 1."""
    task = load(model)
    assert [request.sample_id for request in task.requests] == [f"{kind}/{n}" for kind in KINDS for n in range(2)]
    assert not any(request.truncated for request in task.requests)
    assert set(task.metrics) == {"score", "exact", "partial"}
    for request in task.requests:
        assert request.subset == request.sample_id.split("/")[0]
        assert len(request.gold) <= request.max_new_tokens
        gold = tokenizer.decode(request.gold)
        assert task.score(request, gold) == {"score": 1.0, "exact": 1.0, "partial": 1.0}
        assert task.score(request, "nothing of the kind")["exact"] == 0.0


def test_protocols_share_their_tokens(model) -> None:
    """Compressing before the question is seen changes where the prompt is divided, nothing else."""
    aware, agnostic = load(model), load(model, protocol={"query_aware": False})
    assert aware.fingerprint == load(model).fingerprint
    assert aware.fingerprint != agnostic.fingerprint
    for one, two in zip(aware.requests, agnostic.requests, strict=True):
        assert len(two.segments) == 2
        assert two.segments[0] + two.segments[1] == one.segments[0]


def test_settings_reach_the_task(model) -> None:
    """Kinds, items, limit, seed and lengths do what they say."""
    plain = load(model)
    assert plain.protocol["length"] == 600
    assert {request.subset for request in load(model, kinds=["kv"]).requests} == {"kv"}
    assert len(load(model, items=5, limit=1).requests) == 4
    assert len(load(model, items=1, limit=5).requests) == 4
    assert load(model, seed=1).fingerprint != plain.fingerprint != load(model, length=700).fingerprint
    assert load(model, protocol={"max_new_tokens": 3}, kinds=["kv"]).requests[0].max_new_tokens == 3


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"kinds": ["multikee"]}, ("setting-value", "task.kinds", "['multikee']", "mean multikey")),
        ({"kinds": "passkey2"}, ("setting-value", "task.kinds", "'passkey2'", "mean passkey")),
        ({"length": 100}, ("setting-value", "task.length", "task.length=100", "256")),
        ({"length": 5000}, ("setting-value", "task.length", "task.length=5000", "stand-in", "4096")),
        ({"length": 4090}, ("setting-value", "task.length", "task.length=4090", "4068")),
        ({"items": 0}, ("setting-value", "task.items", "1 to 1048576")),
        ({"items": 2.5}, ("setting-value", "task.items", "1 to 1048576")),
        ({"lenght": 100}, ("name-unknown", None, "key=lenght", "mean length")),
        ({"name": "longctxx"}, ("name-unknown", "task.name", "task.name=longctxx", "mean longctx")),
        ({"limit": 0}, ("setting-value", "limit", "limit=0")),
    ],
)
def test_bad_settings(model, settings: dict, error: tuple) -> None:
    """Each is refused with the value, the rule and what exists."""
    with refused(*error):
        load(model, **settings)


def test_a_model_without_tokenizer_is_refused(make_model) -> None:
    """A task cannot be asked without tokens."""
    model = make_model()
    model.tokenizer = None
    with refused("unsupported", "task", "task=longctx", "stand-in"):
        load(model)

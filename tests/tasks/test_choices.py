"""Log-likelihoods of continuations: the same as a plain forward pass with the full cache, and through the pages."""

from types import SimpleNamespace

import pytest
import torch
from lmeval_demo import TINY, outcomes_of
from refusals import refused

from kvbench.lm import KvbenchLM
from kvbench.tasks.choices import choice_request

CONTEXT = "Instances of the class are created by calling the object. " * 6 + "Which one is it?\nAnswer:"
CHOICES = [" A", " B", " the third of them", " D"]
KEYS = {"sample_id": "x/0", "subset": "x"}


def scored(lm: KvbenchLM, request) -> list[dict]:
    """The choices of one request, by the engine."""
    return outcomes_of(lm, [request])["x/0"].choices


def test_full_gives_what_transformers_gives() -> None:
    """With the lossless full cache each choice's sum and greedy flag are those of a plain forward pass."""
    from kvbench.models.load import load_model

    lm = KvbenchLM(method="full", **TINY, **{"method.tier": "native"})
    plain = load_model({**dict(lm.config.model)}).model
    request = choice_request(lm.model, **KEYS, context=CONTEXT, continuations=CHOICES)
    prompt = [token for segment in request.segments for token in segment]
    assert prompt == lm.model.tokenizer.encode(CONTEXT)
    for tokens, found in zip(request.choices, scored(lm, request), strict=True):
        with torch.no_grad():
            logp = plain(torch.tensor([[*prompt, *tokens]])).logits[0].float().log_softmax(-1)[len(prompt) - 1 : -1]
        picked = logp[torch.arange(len(tokens)), torch.tensor(tokens)]
        # fp32; the largest sum here is about 50 nats.
        assert found["loglikelihood"] == pytest.approx(float(picked.sum()), abs=1e-3)
        assert found["greedy"] is bool((logp.argmax(-1) == torch.tensor(tokens)).all())
        assert found["num_tokens"] == len(tokens)


def test_one_token_choices_depend_on_the_method() -> None:
    """The last prompt token is read through the pages, so that even letters tell methods apart."""
    full = KvbenchLM(method="full", **TINY)
    small = KvbenchLM(method="snapkv", **TINY, **{"method.budget": 16, "method.window": 4})
    request = choice_request(full.model, **KEYS, context=CONTEXT, continuations=["A", "B"])
    assert [len(tokens) for tokens in request.choices] == [1, 1]
    assert len(request.segments) == 2 and len(request.segments[1]) == 1
    one, other = scored(full, request), scored(small, request)
    assert all(abs(a["loglikelihood"] - b["loglikelihood"]) > 1e-3 for a, b in zip(one, other, strict=True))


def test_choices_beside_each_other_are_as_alone() -> None:
    """Choices on forks of one compressed prompt, under a policy that acts in decoding, do not see each other."""
    lm = KvbenchLM(method="h2o", **TINY, **{"method.budget": 24})
    together = choice_request(lm.model, **KEYS, context=CONTEXT, continuations=CHOICES)
    alone = [scored(lm, choice_request(lm.model, **KEYS, context=CONTEXT, continuations=[text]))[0] for text in CHOICES]
    for one, other in zip(scored(lm, together), alone, strict=True):
        assert one["loglikelihood"] == pytest.approx(other["loglikelihood"], abs=1e-4)


def test_lm_prefills_a_shared_prompt_once() -> None:
    """lm-eval's requests with one prompt become one request; their results come back in lm-eval's order."""
    from lm_eval.api.instance import Instance

    lm = KvbenchLM(method="full", **TINY)
    asked, run = [], lm._run
    lm._run = lambda requests, **settings: asked.extend(requests) or run(requests, **settings)
    pairs = [("One two", " a"), ("Three four", " c"), ("One two", " b"), ("One two", " a")]
    results = lm.loglikelihood([Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(pairs)])
    assert [len(request.choices) for request in asked] == [3, 1]
    assert results[0] == results[3] and len({total for total, _ in results}) == 3


def test_a_long_prompt_loses_its_beginning(make_model, tokenizer) -> None:
    """Prompt and longest continuation fit the model exactly; the end of the prompt is kept."""
    model = make_model(max_tokens=40)
    request = choice_request(model, **KEYS, context=CONTEXT, continuations=CHOICES)
    longest = max(map(len, request.choices))
    assert request.num_prompt_tokens + longest == 40 and request.truncated
    whole = tokenizer.encode(CONTEXT)
    assert [*request.segments[0], *request.segments[1]] == whole[-request.num_prompt_tokens :]


def test_no_question_token_before_compression(make_model, tokenizer) -> None:
    """In the agnostic protocol the first segment holds the context only, and both protocols run the same tokens."""
    question = " Where was it?\nAnswer:"
    parts = choice_request(make_model(), **KEYS, context="It was in Rome.", question=question, continuations=CHOICES)
    whole = choice_request(make_model(), **KEYS, context="It was in Rome." + question, continuations=CHOICES)
    assert tokenizer.decode(parts.segments[0], skip_special_tokens=True) == "It was in Rome."
    assert parts.segments[0] + parts.segments[1] == whole.segments[0] + whole.segments[1]
    assert parts.choices == whole.choices


@pytest.mark.parametrize("texts", [[""], [" A", ""], ["word " * 60]])
def test_what_cannot_be_scored_is_refused(make_model, texts) -> None:
    """Nothing to score, or no room for a prompt."""
    with refused("prompt-length", None, "x/0"):
        choice_request(make_model(max_tokens=32), **KEYS, context="a b c", continuations=texts)


def test_an_empty_prompt_is_what_begins_a_text(make_model, tokenizer) -> None:
    """The beginning-of-text token stands for it."""
    request = choice_request(make_model(), **KEYS, context="", continuations=[" A"])
    assert request.segments == ((tokenizer.bos_token_id,),)
    other = SimpleNamespace(tokenizer=tokenizer, max_tokens=9, name="x")
    assert choice_request(other, **KEYS, context=" ", continuations=["A"]).choices == request.choices


def test_the_right_choice_is_compared_with_the_full_cache() -> None:
    """Also its first token is read through the pages, so KL and agreement count it; its NLL is the choice's own."""
    lm = KvbenchLM(method="snapkv", **TINY, **{"method.budget": 16, "method.window": 4})
    request = choice_request(lm.model, **KEYS, context=CONTEXT, continuations=["A", "B"], gold=1)
    outcome = outcomes_of(lm, [request], forced=4)["x/0"]
    assert outcome.fidelity["num_tokens"] == 1
    assert outcome.fidelity["nll"] == pytest.approx(-outcome.choices[1]["loglikelihood"], abs=1e-5)
    assert outcome.fidelity["kl_mean"] > 1e-4 and outcome.fidelity["top1_agreement"] in (0.0, 1.0)

"""A small tokenizer trained on the spot, and models that are nothing but a tokenizer and a context length."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

# Strips the message like Llama 3's template, and writes its own special tokens.
CHAT_TEMPLATE = (
    "<s>{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer():
    """Gives a byte-level BPE tokenizer of 2,000 tokens that puts <s> before every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    from kvbench.tasks.haystack import paragraphs

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<s>", "</s>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(paragraphs()[:200], trainer)
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )


@pytest.fixture
def make_model(tokenizer) -> Callable[..., SimpleNamespace]:
    """Gives a factory of stand-ins for LoadedModel: the tasks use a model's tokenizer and context length only."""

    def make(max_tokens: int = 4096, chat_template: bool = True) -> SimpleNamespace:
        return SimpleNamespace(tokenizer=tokenizer, max_tokens=max_tokens, name="stand-in", chat_template=chat_template)

    return make


@pytest.fixture
def model(make_model):
    """Gives a stand-in for a chat model of 4,096 tokens."""
    return make_model()

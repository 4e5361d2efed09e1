"""A tiny model in a folder, as `save_pretrained` writes it."""

import shutil
from pathlib import Path

import pytest
import torch

from kvbench.models.random_weights import byte_tokenizer, random_config, random_model


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> dict[bool, Path]:
    """Gives a folder with the tiny preset whose embeddings are tied, and one whose are not; nobody changes them."""
    folders = {tied: tmp_path_factory.mktemp("models") / "my-tiny" for tied in (False, True)}
    for tied, folder in folders.items():
        config = random_config("tiny", overrides={"tie_word_embeddings": tied})
        random_model(config, seed=0, dtype=torch.float32, device=torch.device("cpu")).save_pretrained(folder)
        byte_tokenizer(config.vocab_size).save_pretrained(folder)
    return folders


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """Gives a copy of the folder whose embeddings are not tied."""
    return shutil.copytree(saved[False], tmp_path / "my-tiny")

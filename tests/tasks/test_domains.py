"""Built-in domains hold what their sources publish, and say so when they are not here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from apportion.errors import DataError
from apportion.tasks import domain as domain_module
from apportion.tasks import domains as domains_module
from apportion.tasks.archive import read_gzip
from apportion.tasks.domains import BUILT_IN, fashion, load_domain
from apportion.tasks.domains.clinc import INTENTS
from apportion.tasks.domains.entry import Examples, entry, package_file
from apportion.tasks.pictures import Greys

SIZES = {  # name: classes, examples; counted by hand from the READMEs, less repeated texts
    "banking77": (77, 13072),
    "clinc150": (150, 22491),
    "snips": (7, 14216),
    "trec": (6, 5871),
    "grocery": (30, 900),
    "fruits360": (40, 1200),
    "plantdoc": (20, 500),
    "sign_digits": (10, 600),
    "mnist": (10, 1000),
    "omniglot": (1623, 32460),
    "omniglot-vinyals-train": (4112, 82240),
    "omniglot-vinyals-val": (688, 13760),
    "omniglot-vinyals-test": (1692, 33840),
    "fashion_mnist": (10, 10000),
}


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("name", SIZES)
def test_a_domain_has_its_published_size_and_every_class_its_rows(name):
    if BUILT_IN[name].kind == "image":
        pytest.importorskip("PIL.Image", reason="pillow is not installed")
    domain = load_domain(name)
    assert (len(domain.classes), len(domain)) == SIZES[name]
    assert domain.licence
    assert domain.provenance
    rows = np.concatenate([domain.examples(label) for label in domain.classes])
    assert np.array_equal(np.sort(rows), np.arange(len(domain)))
    first = domain.content[0]
    assert isinstance(first, str) if domain.kind == "text" else first.dtype == np.uint8 and first.shape[2] == 3


@pytest.mark.usefixtures("data")
def test_the_ten_domains_of_clinc_share_out_its_intents():
    intents = [intent for part in INTENTS.values() for intent in part.split()]
    assert sorted(intents) == sorted(load_domain("clinc150").classes)
    assert {len(load_domain(f"clinc150/{part}").classes) for part in INTENTS} == {15}


@pytest.mark.usefixtures("data")
def test_omniglot_rotations_are_quarter_turns_of_one_drawing():
    upright, turned = load_domain("omniglot"), load_domain("omniglot-vinyals-test")
    name = turned.classes[0].rpartition("/")[0]
    drawing = upright.content[int(upright.examples(name)[7])]
    for quarter in range(4):
        same = turned.content[int(turned.examples(f"{name}/rot{90 * quarter:03}")[7])]
        assert np.array_equal(same, np.rot90(drawing, quarter))
    share_of_ink = (drawing == 0).mean()
    assert 0.005 < share_of_ink < 0.3  # thin black strokes on white, not the other way round


def test_domains_from_registries_need_no_data_folder(monkeypatch):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    monkeypatch.setenv("APPORTION_DATA", "/nowhere")
    digits = load_domain("digits")
    assert (len(digits.classes), len(digits)) == (10, 1797)
    assert digits.content[0].shape == (8, 8, 3)
    assert digits.content[0].max() <= 255


@pytest.mark.usefixtures("minilm_installed")
def test_conversations_are_grouped_by_topic():
    domain = load_domain("chatterbot")
    assert {"ai", "food", "science"} <= set(domain.classes)
    assert len(set(domain.content)) == len(domain)


@pytest.mark.parametrize("name", ["banking77", "grocery", "omniglot", "fashion_mnist", "clinc150/work"])
def test_without_the_data_folder_every_domain_says_what_to_set(name, monkeypatch, tmp_path):
    monkeypatch.setenv("APPORTION_DATA", str(tmp_path))
    from apportion.tasks.domains import intents, omniglot

    intents.rows_of.cache_clear()
    omniglot._arrays.cache_clear()
    with pytest.raises(DataError, match="set APPORTION_DATA"):
        load_domain(name)
    assert "APPORTION_DATA" in BUILT_IN[name].missing()


def test_a_changed_data_file_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("APPORTION_DATA", str(tmp_path))
    (tmp_path / "vision").mkdir()
    (tmp_path / "vision" / "grocery.zip").write_bytes(b"PK not what was published")
    with pytest.raises(DataError, match="SHA-256 differs"):
        load_domain("grocery")


@pytest.mark.usefixtures("data")
def test_the_debian_package_is_read_where_it_is_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(fashion, "DEBIAN_FOLDER", tmp_path)
    with pytest.raises(DataError, match="apt-get install dataset-fashion-mnist"):
        load_domain("fashion_mnist-debian")
    source = domain_module.data_root() / "vision"
    for ours, published in {"images": "images-idx3", "labels": "labels-idx1"}.items():
        for part in ("train", "t10k"):  # the test files stand in for the training files too
            (tmp_path / f"{part}-{published}-ubyte.gz").symlink_to(source / f"fashion_mnist_t10k_{ours}.gz")
    domain = load_domain("fashion_mnist-debian")
    assert len(domain) == 20000
    assert len(domain.select(splits=["test"])) == 10000


@pytest.mark.parametrize("data", [b"", b"\0\0\x08\x01\0\0\0\x05abc", b"\0\0\x0d\x01\0\0\0\x03abc"])
def test_a_broken_idx_file_is_refused(tmp_path, data):
    import gzip

    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(data))
    with pytest.raises(DataError, match="no idx array"):
        fashion.read_idx(path)


def test_a_gzip_bomb_is_refused(tmp_path):
    import gzip

    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(bytes(5000)))
    with pytest.raises(DataError, match="unpacks to more than 4999 bytes"):
        read_gzip(path, max_bytes=4999)
    assert len(read_gzip(path, max_bytes=5000)) == 5000


@pytest.mark.parametrize("name", ["digits", "chatterbot"])
def test_a_domain_is_a_file_of_thirty_lines(name):
    path = Path(domains_module.__file__).with_name(f"{name}.py")
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 30
    assert set(BUILT_IN) >= {name}


def test_an_entry_of_texts_and_of_images_becomes_a_domain():
    texts = entry(
        "mine",
        lambda: Examples(["a", "b", "b"], ["one", "two", "two"], "0" * 64),
        kind="text",
        summary="letters",
        licence="MIT",
        provenance="nowhere",
    )["mine"].load()
    assert (texts.classes, len(texts), texts.notes) == (("one", "two"), 2, ("1 repeated rows left out",))
    grey = np.zeros((2, 3, 4), np.uint8)
    options = {"kind": "image", "summary": "greys", "licence": "MIT", "provenance": "nowhere"}
    pictures = entry("greys", lambda: Examples(Greys(grey), ["b", "a"], "1" * 64), **options)["greys"].load()
    assert pictures.classes == ("a", "b")
    assert pictures.label_N.tolist() == [1, 0]
    assert pictures.content[0].shape == (3, 4, 3)
    other = entry("greys", lambda: Examples(Greys(grey), ["b", "a"], "1" * 64), checksum="2" * 64, **options)["greys"]
    assert "not the ones published" in other.missing()
    assert (
        "pip install no-such-package"
        in entry("x", lambda: package_file("no-such-package", "x"), **options)["x"].missing()
    )


def test_an_unknown_name_lists_what_is_possible():
    with pytest.raises(DataError, match=r"no domain 'bankin'.*banking77"):
        load_domain("bankin")


@pytest.mark.usefixtures("data")
def test_a_part_keeps_its_classes_splits_and_gets_its_own_checksum():
    domain = load_domain("banking77")
    part = domain.select(classes=["card_*"], splits=["test"])
    assert all(name.startswith("card_") for name in part.classes)
    assert set(part.split_N) == {"test"}
    for row in (0, len(part) - 1):
        text = part.content[row]
        assert domain.classes[domain.label_N[domain.content.index(text)]] == part.classes[part.label_N[row]]
    assert part.checksum != domain.checksum
    with pytest.raises(DataError, match="no class 'dog'"):
        domain.select(classes=["dog"])
    with pytest.raises(DataError, match="no split 'dev'"):
        domain.select(splits=["dev"])

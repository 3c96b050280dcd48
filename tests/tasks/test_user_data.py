"""The user's folders, archives and tables: read whole, or refused in one line that names the trouble."""

from __future__ import annotations

import json
import sys
import zipfile

import pytest
from tests.tasks.conftest import png

from apportion.errors import DataError
from apportion.tasks.archive import read_zip
from apportion.tasks.domains import load_domain

ROWS = [("turn it on", "light"), ("turn it off", "light"), ("play a song", "music"), ("stop the song", "music")]


def write(path, rows=ROWS, text="text", label="label"):
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps({text: t, label: c}) for t, c in rows), encoding="utf-8")
    elif path.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
        import pyarrow

        parquet.write_table(pyarrow.table({text: [t for t, _ in rows], label: [c for _, c in rows]}), path)
    else:
        mark = "\t" if path.suffix == ".tsv" else ","
        path.write_text("\n".join(mark.join(row) for row in [(text, label), *rows]), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet"])
def test_every_table_gives_the_same_domain(tmp_path, ending):
    domain = load_domain(write(tmp_path / f"mine.{ending}"))
    assert domain.classes == ("light", "music")
    assert list(domain.content) == [text for text, _ in ROWS]
    assert domain.label_N.tolist() == [0, 0, 1, 1]
    assert domain.notes == ()


def test_other_column_names_can_be_given(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("phrase,answer,kind\none,two,a\nthree,four,b\n")
    with pytest.raises(DataError, match="columns phrase, answer, kind, not a text column"):
        load_domain(str(path))
    domain = load_domain(str(path), text_column="phrase", label_column="kind")
    assert list(domain.content) == ["one", "three"]
    answers = load_domain(str(path), text_column="answer", label_column="kind")
    assert answers.checksum != domain.checksum  # other columns are another domain


def test_repeated_rows_are_counted_and_refused_when_strict(tmp_path):
    path = write(tmp_path / "mine.csv", [*ROWS, ROWS[0], ("stop the song", "light")])
    domain = load_domain(path)
    assert list(domain.content) == ["turn it on", "turn it off", "play a song"]  # the one under two labels is gone
    assert domain.notes == ("2 repeated rows left out", "1 texts under two labels left out")
    with pytest.raises(DataError, match=r"repeats 2 of its 6 rows.*'stop the song'"):
        load_domain(path, strict=True)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"text,label\ncaf\xe9,x\n", "not UTF-8 at byte 14"),
        ("a.csv", b"text\nx\n", "not a label column"),
        ("a.csv", b"text,label\nx\n", "row 1 has no"),
        ("a.csv", b"text,label\n", "columns none"),
        ("a.jsonl", b"[1]\n", "one JSON object a line"),
        ("a.jsonl", b"{bad", "can't be read"),
        ("a.xml", b"<a/>", "unknown ending"),
        ("a.parquet", b"PAR1 not really", "can't be read as Parquet"),
    ],
)
def test_bad_tables_are_refused_in_one_line(tmp_path, name, content, message):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_domain(str(tmp_path / name))
    assert "\n" not in str(caught.value)


def photos(folder, pillow):
    for label, colour in {"red": (255, 0, 0), "blue": (0, 0, 255)}.items():
        (folder / label).mkdir(parents=True)
        for place in range(3):
            (folder / label / f"{place}.png").write_bytes(png(pillow, colour))
    return folder


def test_a_folder_of_class_folders_is_a_domain(tmp_path, pillow):
    domain = load_domain(str(photos(tmp_path / "mine", pillow)))
    assert domain.classes == ("blue", "red")
    assert domain.content[int(domain.examples("red")[0])][0, 0].tolist() == [255, 0, 0]
    assert load_domain(str(tmp_path / "mine")).checksum == domain.checksum
    (tmp_path / "mine" / "red" / "3.png").write_bytes(png(pillow))
    assert len(load_domain(str(tmp_path / "mine"))) == 7  # the cache does not hide a new file


def test_a_large_photograph_is_scaled_down(tmp_path, pillow):
    folder = photos(tmp_path / "mine", pillow)
    (folder / "red" / "large.png").write_bytes(png(pillow, side=1000))
    domain = load_domain(str(folder))
    assert max(max(image.shape[:2]) for image in domain.content) == 256


def test_an_unreadable_image_is_named_and_counted_or_refused(tmp_path, pillow):
    folder = photos(tmp_path / "mine", pillow)
    whole = png(pillow, side=64)
    (folder / "red" / "broken.png").write_bytes(whole[: len(whole) // 2])
    (folder / "red" / "text.jpg").write_bytes(b"no image at all")
    (folder / "red" / "program.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    domain = load_domain(str(folder))
    assert len(domain) == 6
    assert "3 unreadable images" in domain.notes[0]  # PostScript, which would be run, is no image here
    assert "red/broken.png" in domain.notes[0]
    with pytest.raises(DataError, match=r"red/broken\.png is unreadable"):
        load_domain(str(folder), strict=True)


def test_a_folder_without_classes_is_refused(tmp_path, pillow):
    (tmp_path / "loose.png").write_bytes(png(pillow))
    with pytest.raises(DataError, match="no images in class folders"):
        load_domain(str(tmp_path))


def test_a_link_out_of_the_folder_is_not_followed(tmp_path, pillow):
    folder = photos(tmp_path / "mine", pillow)
    (tmp_path / "secret.png").write_bytes(png(pillow))
    (folder / "red" / "link.png").symlink_to(tmp_path / "secret.png")
    assert len(load_domain(str(folder))) == 6


def zipped(path, files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in files.items():
            file.writestr(name, data)
    return path


def test_a_zip_of_class_folders_is_a_domain(tmp_path, pillow):
    path = zipped(tmp_path / "mine.zip", {f"{label}/{n}.png": png(pillow) for label in "ab" for n in range(2)})
    assert load_domain(str(path)).classes == ("a", "b")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "cache", path]  # nothing is unpacked


@pytest.mark.parametrize("name", ["../x.png", "a/../../x.png", "/etc/x.png", "C:/x.png", "a\\..\\..\\x.png"])
def test_a_zip_that_leads_outside_is_refused(tmp_path, name):
    path = tmp_path / "bad.zip"
    with zipfile.ZipFile(path, "w") as file:
        member = zipfile.ZipInfo("placeholder")
        member.filename = name
        file.writestr(member, b"x")
    with pytest.raises(DataError, match="leads outside its folder"):
        load_domain(str(path))


def test_a_link_in_a_zip_is_refused(tmp_path):
    path = tmp_path / "bad.zip"
    with zipfile.ZipFile(path, "w") as file:
        member = zipfile.ZipInfo("a/link.png")
        member.external_attr = 0o120777 << 16
        file.writestr(member, "/etc/passwd")
    with pytest.raises(DataError, match="leads outside"):
        list(read_zip(path))


def test_a_zip_that_unpacks_to_gigabytes_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file, file.open("a/x.png", "w") as member:
        for _ in range(65):
            member.write(bytes(1_000_000))
    assert path.stat().st_size < 1_000_000
    with pytest.raises(DataError, match=r"unpacks to 65000000 bytes"):
        load_domain(str(path))
    many = zipped(tmp_path / "many.zip", {f"a/{n}.png": bytes(1000) for n in range(20)})
    with pytest.raises(DataError, match="unpacks to 20000 bytes"):
        list(read_zip(many, max_total_bytes=19_999))


def test_a_zip_that_lies_about_its_size_is_refused(tmp_path):
    path = zipped(tmp_path / "liar.zip", {"a/x.png": bytes(100_000)})
    data = path.read_bytes()
    path.write_bytes(data.replace((100_000).to_bytes(4, "little"), (10).to_bytes(4, "little")))
    with pytest.raises(DataError, match=r"larger than it declares|can't be read"):
        list(read_zip(path))


def test_something_that_is_no_zip_is_refused(tmp_path):
    (tmp_path / "x.zip").write_bytes(b"hello")
    with pytest.raises(DataError, match="can't be read as a zip"):
        load_domain(str(tmp_path / "x.zip"))


def test_an_image_of_too_many_pixels_is_left_out(tmp_path, pillow, monkeypatch):
    from apportion.tasks import pictures

    folder = photos(tmp_path / "mine", pillow)
    (folder / "red" / "wide.png").write_bytes(png(pillow, side=40))
    monkeypatch.setattr(pictures, "MAX_PIXELS", 1000)
    assert "40 × 40 pixels are more than 1000" in load_domain(str(folder)).notes[0]


def test_without_pillow_images_say_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "mine" / "red").mkdir(parents=True)
    (tmp_path / "mine" / "red" / "0.png").write_bytes(b"anything")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(DataError, match=r"images need pillow; run: pip install 'apportion\[tasks\]'"):
        load_domain(str(tmp_path / "mine"))

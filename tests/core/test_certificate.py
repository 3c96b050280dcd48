"""The certificate: survives JSON, is worked out again rather than believed, and refuses what is none."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.core.budget import Budget
from apportion.core.certificate import VERSION, Certificate, Floor
from apportion.core.meter import Reading
from apportion.errors import ApportionError


def certificate(measured_ms=7.5, stderr=0.1, z=1.645, **changes):
    fields = {
        "asked": "60%, 20MB",
        "budget": Budget.parse("8ms@torch-cpu-1t, 20MB"),
        "baseline": {"latency@torch-cpu-1t": Reading(value=13.3, unit="ms", stderr=0.2, count=5)},
        "measured": {
            "latency@torch-cpu-1t": Reading(value=measured_ms, unit="ms", stderr=stderr, count=7),
            "size": Reading(value=19e6, unit="B"),
        },
        "quality": {"accuracy": Reading(value=0.1 + 0.2, unit="accuracy", stderr=0.01, count=500)},
        "artefact": "sha256:00ff",
        "target": "torch-cpu-1t",
        "conditions": {"cpu": "Größe ½", "versions": {"torch": "2.13.0"}, "num_processes": 5},
        "measured_at": "2025-11-15T20:00:00+00:00",
        "confidence": 0.95,
        "z": z,
    }
    return Certificate(**{**fields, **changes})


def floor(kept=0.985, stderr=0.004, asked=0.98, confidence=0.5):
    return Floor(
        asked=asked,
        confidence=confidence,
        kept=Reading(value=kept, unit="ratio", stderr=stderr, count=1024),
        before=Reading(value=0.93, unit="ratio", stderr=0.008, count=1024),
        after=Reading(value=0.93 * kept, unit="ratio", stderr=0.008, count=1024),
        examples="1024 of banking77",
    )


def text_of(fields):
    return json.dumps(fields, ensure_ascii=False)


def test_a_certificate_survives_json():
    original = certificate()
    again = Certificate.from_json(text_of(original.to_json()))
    assert again == original
    assert again.to_json() == original.to_json()


finite = st.floats(allow_nan=False, allow_infinity=False)


@settings(deadline=None)
@given(st.floats(1e-6, 1e6), st.floats(0.0, 10.0), st.floats(0.0, 4.0), st.dictionaries(st.text(), finite | st.text()))
def test_any_certificate_survives_json_and_keeps_its_verdict(measured_ms, stderr, z, conditions):
    original = certificate(measured_ms, stderr, z, conditions=conditions)
    again = Certificate.from_json(text_of(original.to_json()))
    assert again == original
    assert again.met == original.met == (8.0 - (measured_ms + z * stderr) >= 0)


def test_met_means_every_limit_holds_at_the_confidence_stated():
    assert certificate(7.9, stderr=0.0).met
    assert certificate(7.9, stderr=0.1, z=0.0).met
    assert not certificate(7.9, stderr=0.1, z=1.645).met
    assert not certificate(8.1, stderr=0.0).met
    over_in_size = {**certificate().measured, "size": Reading(value=21e6, unit="B")}
    assert not certificate(measured=over_in_size).met


@pytest.mark.parametrize("measured_ms", [7.0, 9.0])
@pytest.mark.parametrize("claim", [True, False, "yes", None, 1])
def test_met_is_worked_out_again_and_not_believed(measured_ms, claim):
    fields = certificate(measured_ms).to_json()
    fields["met"] = claim
    again = Certificate.from_json(text_of(fields))
    assert again.met == (measured_ms == 7.0)
    assert again.to_json()["met"] == (measured_ms == 7.0)
    del fields["met"]
    assert Certificate.from_json(text_of(fields)).met == (measured_ms == 7.0)


def changed(**changes):
    return text_of({**certificate().to_json(), **changes})


def without(name):
    return text_of({key: value for key, value in certificate().to_json().items() if key != name})


GOOD_LIMIT = {"quantity": "latency", "value": 8.0, "unit": "ms", "target": None}
MALFORMED = {
    **{f"without {name}": without(name) for name in certificate().to_json() if name not in ("met", "files", "floor")},
    "empty": "",
    "not json": "{",
    "two documents": text_of(certificate().to_json()) * 2,
    "null": "null",
    "a list": "[]",
    "a number": "3",
    "a string": '"certificate"',
    "another object": '{"apportion_ledger": 1}',
    "a later version": changed(apportion_certificate=VERSION + 1),
    "version as list": changed(apportion_certificate=[]),
    "an empty budget": changed(budget=[]),
    "budget as text": changed(budget="8ms"),
    "a limit of nothing": changed(budget=[{**GOOD_LIMIT, "value": 0.0}]),
    "a negative limit": changed(budget=[{**GOOD_LIMIT, "value": -8.0}]),
    "an infinite limit": changed(budget=[{**GOOD_LIMIT, "value": math.inf}]),
    "a limit that is not a number": changed(budget=[{**GOOD_LIMIT, "value": math.nan}]),
    "a limit as text": changed(budget=[{**GOOD_LIMIT, "value": "8"}]),
    "a limit in another unit": changed(budget=[{**GOOD_LIMIT, "unit": "s"}]),
    "a limit on an unknown quantity": changed(budget=[{**GOOD_LIMIT, "quantity": "a\nb"}]),
    "the same limit twice": changed(budget=[GOOD_LIMIT, GOOD_LIMIT]),
    "a limit with a field too many": changed(budget=[{**GOOD_LIMIT, "hard": True}]),
    "a limit with a field too few": changed(budget=[{"quantity": "latency"}]),
    "measured as list": changed(measured=[]),
    "a reading as number": changed(measured={"size": 3.0}),
    "a reading that is not finite": changed(
        measured={"size": {"value": math.inf, "unit": "B", "stderr": 0.0, "count": 1}}
    ),
    "a reading in doubt below zero": changed(
        measured={"size": {"value": 1.0, "unit": "B", "stderr": -1.0, "count": 1}}
    ),
    "a reading over no samples": changed(quality={"a": {"value": 1.0, "unit": "", "stderr": 0.0, "count": 0}}),
    "conditions as number": changed(conditions=3),
    "confidence as word": changed(confidence="high\nvery"),
    "no z": changed(z=None),
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_what_is_no_certificate_is_refused_in_one_line(text):
    with pytest.raises(ApportionError, match="not a certificate of version 1") as refused:
        Certificate.from_json(text)
    assert len(str(refused.value).splitlines()) == 1


@settings(deadline=None, max_examples=200)
@given(
    st.text()
    | st.recursive(
        st.none() | finite | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from(["apportion_certificate", "budget", "measured", "z"]) | st.text(), inner)
        ),
    ).map(json.dumps)
)
def test_any_text_is_refused_in_one_line(text):
    with pytest.raises(ApportionError) as refused:
        Certificate.from_json(text)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        changed(z=10**400),
        changed(measured={"size": {"value": 1.0, "unit": "B", "stderr": 0.0, "count": math.inf}}),
        changed(budget=[{**GOOD_LIMIT, "value": -1, "unit": "a\nb"}]),
    ],
    ids=["deep", "huge number", "infinite count", "line break"],
)
def test_what_is_hostile_is_refused_in_one_line(text):
    with pytest.raises(ApportionError) as refused:
        Certificate.from_json(text)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    "text",
    [
        changed(measured={}),
        changed(budget=[{**GOOD_LIMIT, "unit": "%"}]),
        changed(z=-100.0),
        changed(z=math.nan),
        changed(confidence=7.0),
    ],
    ids=["nothing measured", "relative", "negative z", "z not a number", "confidence above one"],
)
def test_a_certificate_that_can_not_be_judged_is_refused(text):
    with pytest.raises(ApportionError):
        Certificate.from_json(text)


def test_a_floor_is_part_of_the_promise_and_worked_out_again():
    kept = certificate(floor=floor())
    assert kept.met
    broken = certificate(floor=floor(kept=0.954))
    assert not broken.met
    for one in (kept, broken):
        claimed = {**one.to_json(), "met": True}
        claimed["floor"] = {**claimed["floor"], "met": True, "doubt": 0.0}
        again = Certificate.from_json(text_of(claimed))
        assert again == one
        assert again.met == one.met


def test_a_floor_is_judged_on_its_value_or_on_a_lower_bound_and_states_both():
    assert floor(0.985, 0.004, confidence=0.5).met
    assert not floor(0.985, 0.004, confidence=0.95).met  # 0.985 - 1.645 * 0.004 = 0.9784
    assert floor(0.985, 0.003, confidence=0.95).met  # 0.9801
    assert floor(0.98, 0.004).doubt == pytest.approx(0.5)
    assert floor(0.985, 0.005).doubt == pytest.approx(0.1587, abs=1e-4)  # one standard error above
    assert floor(0.97, 0.0).doubt == 1.0
    assert floor(0.98, 0.0).met
    assert floor(0.985, 0.004).to_json(0.95)["at_least"]["value"] == pytest.approx(0.985 - 1.6449 * 0.004, abs=1e-6)


def test_certificates_from_before_floors_were_certified_can_be_read():
    assert Certificate.from_json(without("floor")).floor is None
    good = certificate(floor=floor()).to_json()
    for wrong in ({"asked": 2.0}, {"confidence": 0.2}, {"kept": 0.9}, {"examples": None, "asked": "high"}):
        with pytest.raises(ApportionError, match="not a certificate"):
            Certificate.from_json(text_of({**good, "floor": {**good["floor"], **wrong}}))


def test_certificates_from_before_files_were_named_can_be_read():
    assert Certificate.from_json(without("files")).files == {}
    named = certificate(files={"model.onnx": "00ff"})
    assert Certificate.from_json(text_of(named.to_json())) == named
    with pytest.raises(ApportionError, match="not a certificate"):
        Certificate.from_json(text_of({**named.to_json(), "files": ["model.onnx"]}))

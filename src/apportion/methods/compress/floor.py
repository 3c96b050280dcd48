"""The quality floor: how much of the original's quality a finished model keeps, on examples kept aside for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from apportion.core.certificate import Floor, floor_z
from apportion.core.loop import Guard
from apportion.core.meter import Meter, Reading
from apportion.errors import BudgetError
from apportion.methods.compress.bench import Bench
from apportion.methods.compress.judge import Scores
from apportion.models.network import Network
from apportion.models.quantise import simulate
from apportion.tasks.batches import Examples
from apportion.tasks.sample import Sample, Sampled, SampledAnswers, apart

KEPT = "kept"


class FloorMeter:
    """Reads a saved model and the original on the same examples; of int8 what the runtime's own artefact answers."""

    def __init__(self, original: Network, meter: Meter[Network], examples: Examples, bench: Bench) -> None:
        self.meter, self.examples, self.bench = meter, examples, bench
        self._original = self._sampled(original)
        self.before = _reading(self._original)
        if self.before.value <= 0:
            name = type(meter).__name__.lower()
            raise BudgetError(f"the original's {name} is {self.before.value:.2g}, of which no share is a floor")

    def read(self, network: Network, folder: Path, artefact: Path | None = None) -> dict[str, Reading]:
        """The quality of the model in a folder, and the share that it keeps with the paired error."""
        found = self._found(network, folder, artefact)
        if isinstance(found, Sample) and isinstance(self._original, Sample):
            return {"quality": found.reading(), KEPT: found.share_of(self._original)}
        return {"quality": _reading(found), KEPT: apart(_reading(found), self.before)}

    def guard(self, folder: Path) -> Guard[Network]:
        """The loop's guard over what was saved in a folder."""
        config = self.bench.config
        assert config.quality_floor is not None
        z = floor_z(config.floor_confidence)
        return Guard(lambda network: self.read(network, folder), config.quality_floor, KEPT, z)

    def floor(self, readings: Mapping[str, Reading]) -> Floor:
        """What was asked and what was read, as a certificate states it."""
        config = self.bench.config
        assert config.quality_floor is not None
        return Floor(
            asked=config.quality_floor,
            confidence=config.floor_confidence,
            kept=readings[KEPT],
            before=self.before,
            after=readings["quality"],
            examples=self.examples.description,
        )

    def _found(self, network: Network, folder: Path, artefact: Path | None) -> Sample | Reading:
        sample = self.bench.token_sample(self.meter, self.examples, network, folder, artefact)
        if sample is not None:
            return sample
        answer_ND = self.bench.answers(self.meter, self.examples, network, folder, artefact)
        if answer_ND is None:
            return self._sampled(simulate(network) if network.calibration else network)
        if isinstance(self.meter, SampledAnswers):
            return self.meter.sample_of(answer_ND, network.readout)
        assert isinstance(self.meter, Scores)
        return self.meter.score(answer_ND, network.readout)

    def _sampled(self, network: Network) -> Sample | Reading:
        return self.meter.sample(network) if isinstance(self.meter, Sampled) else self.meter.read(network)


def _reading(found: Sample | Reading) -> Reading:
    return found.reading() if isinstance(found, Sample) else found

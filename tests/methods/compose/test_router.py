"""The router: order does not matter, the oracle is learned, new sources work and removed ones do little harm."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from apportion.errors import DataError, ModelError
from apportion.methods.compose.router import (
    Lesson,
    Router,
    TrainConfig,
    distillation,
    load_router,
    save_router,
    source_embedding,
    train,
)

NUM_FEATURES = 12


def world(num_sources, seed=0, turned=False):
    """Sources at random places; a task lies between two of them and the oracle's weights say where.

    Turned, tasks and sources are described in different coordinates, so that likeness alone says nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    source_SP = torch.nn.functional.normalize(torch.randn(num_sources, NUM_FEATURES, generator=generator), dim=-1)

    turn_PP = torch.eye(NUM_FEATURES)
    if turned:
        turn_PP = torch.linalg.qr(torch.randn(NUM_FEATURES, NUM_FEATURES, generator=generator)).Q

    def lesson():
        a, b = torch.randperm(num_sources, generator=generator)[:2].tolist()
        share = float(torch.rand(1, generator=generator))
        teacher = torch.zeros(1, num_sources)
        teacher[0, a], teacher[0, b] = share, 1 - share
        centre = (share * source_SP[a] + (1 - share) * source_SP[b]) @ turn_PP
        return Lesson(centre + 0.1 * torch.randn(4, NUM_FEATURES, generator=generator), teacher)

    return source_SP, lesson


def error(router, lessons, source_SP):
    with torch.no_grad():
        gaps = [(router(lesson.prototype_CP, source_SP) - lesson.teacher_LS).abs().sum() for lesson in lessons]
    return float(torch.stack(gaps).mean())


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    source_SP, lesson = world(8)
    router = Router(NUM_FEATURES, hidden=32)
    train(router, [lesson() for _ in range(60)], source_SP, TrainConfig(epochs=5))
    return router, source_SP, lesson


def test_weights_are_mixtures_whatever_the_order_of_classes(generator):
    router = Router(NUM_FEATURES, num_blocks=3)
    torch.nn.init.normal_(router.query.weight, generator=generator)
    prototype_CP, source_SP = (
        torch.randn(5, NUM_FEATURES, generator=generator),
        torch.randn(4, NUM_FEATURES, generator=generator),
    )
    weight_LS = router(prototype_CP, source_SP)
    assert weight_LS.shape == (3, 4)
    torch.testing.assert_close(weight_LS.sum(-1), torch.ones(3))
    torch.testing.assert_close(router(prototype_CP.flip(0), source_SP), weight_LS)
    torch.testing.assert_close(router(prototype_CP, source_SP.flip(0)), weight_LS.flip(-1))


def test_training_learns_what_likeness_does_not_say():
    torch.manual_seed(0)
    source_SP, lesson = world(6, turned=True)
    router, tests = Router(NUM_FEATURES, hidden=32), [lesson() for _ in range(60)]
    before = error(router, tests, source_SP)
    history = train(router, [lesson() for _ in range(80)], source_SP, TrainConfig(epochs=25))
    assert history[-1] < 0.8 * history[0]
    assert error(router, tests, source_SP) < 0.9 * before


def test_a_new_source_is_used_without_retraining(trained):
    router, source_SP, _ = trained
    generator = torch.Generator().manual_seed(99)
    new_P = torch.nn.functional.normalize(torch.randn(NUM_FEATURES, generator=generator), dim=-1)
    prototype_CP = new_P + 0.1 * torch.randn(4, NUM_FEATURES, generator=generator)
    with torch.no_grad():
        weight_S = router(prototype_CP, torch.cat([source_SP, new_P[None]]))[0]
    assert int(weight_S.argmax()) == 8
    assert weight_S[8] > 0.4


def test_removing_a_source_gives_its_weight_to_the_others(trained):
    router, source_SP, lesson = trained
    for _ in range(10):
        prototype_CP = lesson().prototype_CP
        with torch.no_grad():
            before_S, after_S = router(prototype_CP, source_SP)[0], router(prototype_CP, source_SP[1:])[0]
        assert (after_S >= before_S[1:] - 0.1 * before_S[0] - 1e-3).all()


def test_a_source_added_later_is_scored_by_likeness_and_a_known_one_by_what_was_learned(trained):
    router, source_SP, lesson = trained
    prototype_CP, new_SP = lesson().prototype_CP, source_SP + 0.01
    with torch.no_grad():
        likeness_S = router.likeness(prototype_CP, new_SP)
        torch.testing.assert_close(router(prototype_CP, new_SP)[0], likeness_S / likeness_S.sum())
        learned = router.logits(prototype_CP, source_SP)[0] - router.likeness(prototype_CP, source_SP).log()
    assert router.knows(torch.cat([source_SP[2:], new_SP])).tolist() == [True] * 6 + [False] * 8
    assert learned.abs().max() > 1e-3


def test_a_task_far_from_every_source_gets_all_alike(trained):
    router, source_SP, _ = trained
    away_P = router.middle_P - source_SP.sum(0)
    with torch.no_grad():
        likeness_S = router.likeness(away_P[None], source_SP)
    assert likeness_S.max() < 0.2


def test_penalties_make_weights_sparser():
    source_SP, lesson = world(6, seed=1)
    lessons = [lesson() for _ in range(40)]
    spread = []
    for penalty in (0.0, 5.0):
        torch.manual_seed(0)
        router = Router(NUM_FEATURES, hidden=16)
        train(
            router,
            lessons,
            source_SP,
            TrainConfig(epochs=6, rate=1e-2, entropy_penalty=penalty, sparsity_penalty=penalty),
        )
        with torch.no_grad():
            weights = torch.stack([router(item.prototype_CP, source_SP)[0] for item in lessons])
        spread.append(float(torch.special.entr(weights).sum(-1).mean()))
    assert spread[1] < 0.8 * spread[0]


def test_distillation_is_zero_at_the_teacher_only():
    teacher = torch.tensor([[0.7, 0.2, 0.1]])
    assert distillation(teacher.log(), teacher, 2.0).item() == pytest.approx(0, abs=1e-6)
    assert distillation(torch.zeros(1, 3), teacher, 2.0).item() > 0.05


def test_experts_have_weights_too():
    router = Router(NUM_FEATURES, num_experts=3)
    assert router.expert_weights(torch.randn(4, NUM_FEATURES)).sum().item() == pytest.approx(1)
    with pytest.raises(DataError, match="num_experts"):
        Router(NUM_FEATURES).expert_weights(torch.randn(4, NUM_FEATURES))
    with pytest.raises(DataError, match="at least one"):
        train(router, [], torch.randn(3, NUM_FEATURES))


def test_a_source_is_embedded_where_it_differs_from_its_base(generator):
    base_NP = torch.randn(100, NUM_FEATURES, generator=generator)
    tuned_NP = base_NP.clone()
    tuned_NP[:10] += 1.0
    torch.testing.assert_close(source_embedding(base_NP, tuned_NP), base_NP[:10].mean(0))
    torch.testing.assert_close(source_embedding(base_NP, base_NP), base_NP.mean(0))


def test_a_router_is_saved_and_read_back(trained, tmp_path):
    router, source_SP, lesson = trained
    save_router(tmp_path / "router.safetensors", router, {f"s{n}": row for n, row in enumerate(source_SP)})
    again, embeddings = load_router(tmp_path / "router.safetensors")
    prototype_CP = lesson().prototype_CP
    with torch.no_grad():
        torch.testing.assert_close(
            again(prototype_CP, torch.stack(list(embeddings.values()))), router(prototype_CP, source_SP)
        )


def test_a_file_that_is_no_router_is_refused(tmp_path):
    save_file({"router/x": torch.ones(3)}, tmp_path / "other.safetensors", metadata={"apportion_router": "{}"})
    with pytest.raises(ModelError, match="no router"):
        load_router(tmp_path / "other.safetensors")


def test_features_of_another_encoder_are_refused():
    with pytest.raises(DataError, match="12 features"):
        Router(NUM_FEATURES)(torch.randn(3, 5), torch.randn(2, 5))

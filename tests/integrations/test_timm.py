"""timm: its loss scaler with halfstep's scaler inside."""

from pathlib import Path

from tests.integrations import by_hand

import halfstep

pytestmark = by_hand.needs("timm")
NAME = "timm_digits"


def trained(num: int) -> by_hand.Trained:
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler

    example = by_hand.load(NAME)
    model = example["make_model"]()
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-2)
    schedule = CosineLRScheduler(optimizer, num, t_in_epochs=False)
    done, num_taken = by_hand.Trained([], []), 0
    scaler = halfstep.GradScaler()
    for step, batch in enumerate(example["make_batches"](num)[0], 1):
        one = by_hand.train(model, [batch], optimizer, 1.0, scaler)
        done.losses += one.losses
        if one.skipped:
            done.skipped.append(step)
        num_taken += not one.skipped
        schedule.step_update(num_taken)
    return done


def test_the_example_is_the_loop_by_hand() -> None:
    printed = by_hand.printed_by(NAME, "--steps 60")
    by_hand.assert_printed(printed, trained(60))


def test_a_run_records_the_same(tmp_path: Path) -> None:
    run = by_hand.recorded(NAME, "--steps 30", tmp_path / "run")
    by_hand.assert_recorded(run, trained(30))
    assert [model.name for model in run.models] == ["MlpMixer"]

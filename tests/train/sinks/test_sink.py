from train.records.catalogue import METRICS
from train.sinks.sink import figures_of, settings_of, tag_of


def test_metrics_of_one_group_have_tags_of_one_group() -> None:
    tags = {name: tag_of(name) for name in ("loss", "lr", "loss/web", "validation_loss", "validation_loss/web", "mfu")}
    assert tags == {
        "loss": "train/loss",
        "lr": "train/lr",
        "loss/web": "train/loss/web",
        "validation_loss": "validation/loss",
        "validation_loss/web": "validation/loss/web",
        "mfu": "speed/mfu",
    }
    assert tag_of("average_validation_loss") == "validation/average_loss"
    assert tag_of("device_power_watts") == "device/power_watts"
    assert tag_of("task/copy/acc") == "task/copy/acc"


def test_no_two_metrics_share_a_tag() -> None:
    assert len({tag_of(name) for name in METRICS}) == len(METRICS)


def test_the_figures_of_a_record_are_its_numbers_and_its_seconds_by_kind() -> None:
    record = {"loss": 2.5, "attempt": 1, "note": "text", "seconds": {"step": 0.5}}
    assert figures_of(record) == {"train/loss": 2.5, "run/attempt": 1.0, "seconds/step": 0.5}


def test_settings_have_dotted_names_and_no_passwords() -> None:
    recipe = {
        "name": "a",
        "data": {"sources": [{"path": "https://me:hunter2@host/data?token=hunter2", "mirror": None}]},
        "optim": {"betas": (0.9, 0.95), "fused": True},
    }
    assert settings_of(recipe) == {
        "name": "a",
        "data.sources.0.path": "https://me:***@host/data?token=***",
        "data.sources.0.mirror": "null",
        "optim.betas.0": 0.9,
        "optim.betas.1": 0.95,
        "optim.fused": True,
    }

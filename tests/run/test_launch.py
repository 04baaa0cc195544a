from datetime import datetime
from pathlib import Path

import pytest

from halfstep._tools.run import launch


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_folder_of_a_single_process_is_new():
    class Clock(datetime):
        @classmethod
        def now(cls):
            return cls(2026, 11, 21, 22, 15)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "datetime", Clock)
        folders = [launch.make_folder("train", {}, 1) for _ in range(3)]
    names = ["train-20261121-221500", "train-20261121-221500-2", "train-20261121-221500-3"]
    assert folders == [Path("runs", name) for name in names]
    assert all(folder.is_dir() for folder in folders)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"TORCHELASTIC_RUN_ID": "job-7", "MASTER_PORT": "29500"}, "train-job-7"),
        ({"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500"}, "train-29500-123"),
        ({"MASTER_PORT": "29500"}, "train-29500-123"),
        ({"TORCHELASTIC_RUN_ID": "a/../b"}, "train-a-..-b"),
    ],
)
def test_ranks_come_to_the_same_folder(environ, name):
    folders = [
        launch.make_folder("train", environ | {"WORLD_SIZE": "2", "RANK": rank}, 123)
        for rank in "01"
    ]
    assert folders == [Path("runs", name)] * 2


def test_one_of_one_rank_is_a_single_process():
    environ = {"WORLD_SIZE": "1", "RANK": "0", "TORCHELASTIC_RUN_ID": "x"}
    assert launch.make_folder("train", environ, 1).name.startswith(f"train-{datetime.now():%Y}")

import pytest

from service.cli.processes import workers
from service.cli.processes.workers import devices_of_workers, visible_devices
from service.config.settings import Settings
from service.errors import StartupError


def test_each_worker_gets_the_next_devices():
    settings = Settings(data_parallel_size=2, device="cuda")
    assert devices_of_workers(settings, {}, ["0", "1", "2"]) == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "1"},
    ]
    groups = Settings(data_parallel_size=2, tensor_parallel_size=2, device="cuda")
    assert devices_of_workers(groups, {}, ["4", "5", "GPU-a", "GPU-b"]) == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"},
    ]


def test_too_few_devices_are_counted_in_the_error():
    with pytest.raises(StartupError, match=r"^--data-parallel-size: 3 workers of 1 GPU need 3, 1 is visible \(nvidia"):
        devices_of_workers(Settings(data_parallel_size=3, device="cuda"), {}, ["0"])
    groups = Settings(data_parallel_size=2, tensor_parallel_size=2, device="cuda")
    with pytest.raises(StartupError, match=r"2 workers of 2 GPUs need 4, 3 are visible \(CUDA_VISIBLE_DEVICES\)"):
        devices_of_workers(groups, {"CUDA_VISIBLE_DEVICES": "0,1,2"}, ["0", "1", "2"])


def test_workers_on_a_cpu_need_no_devices(monkeypatch):
    assert devices_of_workers(Settings(data_parallel_size=3, device="cpu"), {}, ["0"]) == [{}, {}, {}]
    assert devices_of_workers(Settings(data_parallel_size=3), {}, []) == [{}, {}, {}]
    monkeypatch.setattr(workers, "find_spec", lambda name: None)
    assert devices_of_workers(Settings(data_parallel_size=3), {}, ["0"]) == [{}, {}, {}]


def test_a_single_worker_keeps_the_devices_that_it_sees():
    assert devices_of_workers(Settings(device="cuda"), {}, []) == [{}]


def test_devices_match_cudas(tmp_path):
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_devices({}, tmp_path) == ["0", "1"]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "2, 5"}, tmp_path) == ["2", "5"]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "2,-1,5"}, tmp_path) == ["2"]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []

import pytest
import torch

from kintsugi.model.device import CPU_IDENTITY, choose_device, identity
from kintsugi.model.memory import device_index


def test_ranks_and_servers_have_devices_of_their_own_while_there_are_enough() -> None:
    processes = ["model-0", "model-1", "server-0", "server-1"]
    assert [device_index(process, num_devices=4) for process in processes] == [0, 1, 3, 2]
    assert [device_index(process, num_devices=2) for process in processes] == [0, 1, 1, 0]
    assert [device_index(process, num_devices=1) for process in processes] == [0, 0, 0, 0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without CUDA")
def test_without_an_accelerator_everything_runs_on_the_cpu() -> None:
    assert choose_device("model-0") == choose_device("server-1") == torch.device("cpu")
    assert identity(choose_device("model-0")) == CPU_IDENTITY

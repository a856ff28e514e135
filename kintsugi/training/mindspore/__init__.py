"""MindSpore as the training framework of a rank. Nothing here imports torch; only a rank of MindSpore imports it.

device.py       the device runtime below it: CPU, and the calls for Ascend NPUs
network.py      forward pass of the Llama/Qwen definition
losses.py       token losses of SFT and of the policy gradient
passes.py       objectives: loss and gradient of a micro-batch
state.py        weights, moments and gradient in host memory, parameters on the device
calls.py        table from interface to method
adapter.py      operations of a recovery: the flow without a rollback
framework.py    all of these, as `training.framework.Framework`
"""

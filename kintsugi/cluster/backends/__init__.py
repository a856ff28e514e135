"""Back ends: engines that place host supervisors on machines (`contract.py`). Everything below a supervisor is ours.

contract.py   the contract, with what a back end is asked and what it tells
command.py    one command of an engine: started with a ticket on its standard input, watched, ended
local.py      supervisors as processes of this machine
ssh.py        the hosts of a file, each started over ssh
slurm.py      the nodes of a Slurm allocation, one job step each
ray.py        nodes of a Ray cluster; ray_driver.py talks to Ray, ray_actor.py runs on each node, ray_protocol.py is
              what they tell each other
kubernetes/   pods of a cluster
"""

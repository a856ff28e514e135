"""Kubernetes as a back end: hosts are pods, of an Indexed Job, of a Volcano job, or on their own.

access.py       where the API server is and how to be let in: kubeconfig, or the service account of a pod
client.py       the API over HTTP: requests with retries, lists, watches that survive cut connections
pod_command.py  a command in a pod, with lines as input and output
manifests.py    every object that is created, and the rights that this needs
rights.py       the rights of an account, compared with those that are needed
pods.py         pure decisions: from what a watch shows of pods to hosts that came or went
backend.py      the contract of back ends, on a thread with an event loop
"""

"""Execution of untrusted programs in namespaces with limits."""

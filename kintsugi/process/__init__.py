"""The frame of every process: its outermost boundary, its membership in the run, and the control thread of a worker.

main.py           `run_process`: events for begin and end, exit code, uncaught errors
membership.py     registration with the master, heartbeats, the end of the lifeline
shell.py          `Shell`: endpoint and membership in a control thread, for processes that compute in the main thread
thread_errors.py  uncaught exceptions of threads
exit_codes.py     exit codes
"""

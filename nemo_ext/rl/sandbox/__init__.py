"""Runs untrusted programs, each in its own processes that leave nothing behind.

limits.py     resource limits of a program
sandbox.py    queue of programs, from threads and from asyncio
box.py        one supervised place for the runs of one answer
isolation.py  isolation found to work on this machine
inside/       code on the other side: standard library only, nothing of the host's memory or environment
"""

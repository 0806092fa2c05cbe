"""Sandbox for untrusted programs: each runs in its own processes, which leave nothing behind.

limits.py     resource limits of a program
sandbox.py    queue of programs, from threads and from asyncio
box.py        host side of a supervisor, which runs the programs of one answer
isolation.py  the isolation that works on this machine
inside/       code of the supervisor: standard library only, without the host's memory or environment
"""

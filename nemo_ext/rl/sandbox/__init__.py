"""Sandbox for untrusted programs, which run in separate processes that leave nothing behind.

limits.py     a program's resource limits
sandbox.py    queue of programs, for threads and asyncio
box.py        host side of a supervisor, which runs one answer's programs
isolation.py  the isolation that is available on this machine
inside/       code of the supervisor: standard library only, without the host's memory or environment
"""

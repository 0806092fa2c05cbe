"""Supervisors of programs, which run in a separate interpreter and import only the standard library.

nursery.py     the interpreter that forks supervisors
wire.py        messages between supervisor and host
kernel.py      system calls that Python does not wrap
syscalls.py    system call filter
confinement.py namespaces, or the confinement available without them
processes.py   all processes of a program: their usage, and killing them
process.py     one run: its process, limits and output
program.py     setup within the program's process, before its own code runs
supervisor.py  runs the programs of one answer, one after the other
"""

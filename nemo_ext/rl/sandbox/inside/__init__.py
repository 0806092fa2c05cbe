"""Supervisors of programs. They run in an interpreter of their own and import the standard library only.

nursery.py     started interpreter whose children the supervisors are
wire.py        messages between it and the host
kernel.py      system calls that Python does not wrap
syscalls.py    system calls that programs are refused
confinement.py namespaces, or the confinement available without them
processes.py   the processes of a program, their usage, and their end
program.py     steps of the program's own process before it is the program
supervisor.py  the programs of one answer, one after the other
"""

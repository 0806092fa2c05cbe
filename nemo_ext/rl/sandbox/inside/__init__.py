"""The supervisors of answers' programs. They run in an interpreter of their own and import the standard library only.

nursery.py     an interpreter that has started; supervisors are its children
wire.py        messages between it and the host
kernel.py      the system calls that Python has no name for
syscalls.py    the system calls that programs are refused
confinement.py namespaces, or what is to be had without them
processes.py   which processes are a program's, what they use, and their end
program.py     what the program's own process does before it is the program
supervisor.py  one answer's programs, one after the other
"""

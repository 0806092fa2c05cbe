"""Programs that nobody trusts, each in processes of its own that leave nothing behind.

limits.py     what a program may use
sandbox.py    how many run at once, from threads and from asyncio
box.py        one supervised place for the runs of one answer
isolation.py  what keeps a program in, as it was found to work here
inside/       what runs on the other side: standard library only, nothing of the host's memory or environment
"""

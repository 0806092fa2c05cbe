"""SFT data: conversations are read, filtered, rendered with a chat template, masked, sampled, packed and reported
on.
"""

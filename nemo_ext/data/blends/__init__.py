"""Blends: the streams to train on, and their shares."""

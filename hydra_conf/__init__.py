"""Hydra configurations, as a package so that an installed wheel finds them (pkg://hydra_conf)."""

"""Tandem: reinforcement learning of language models, on a CPU or on GPUs."""

from importlib import import_module

from tandem.config.libraries import set_up

__version__ = "0.1.0"

set_up()  # before anything imports torch
import_module("tandem.algorithms")  # registers the parts whose names the configuration checks; torch waits

"""Metadata lives in pyproject.toml; this file only adds the optional native extension."""

from setuptools import setup

setup()

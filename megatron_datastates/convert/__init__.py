"""Checkpoints of all formats, read and written without Megatron: conversion, comparison, export, inspection.

What belongs here: sources (each reads one format), sinks (each writes one format) and the jobs between them.
What does not: Megatron, and how results are shown (cli).
"""

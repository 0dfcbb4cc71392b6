"""Runs a labelled set through two models and writes what a cascade of them costs and loses."""

"""Pods of stages on a cluster: images, shapes, resources, and additions of a site."""

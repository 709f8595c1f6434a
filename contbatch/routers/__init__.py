"""Which replica gets a request: the base of all routers, and the ready ones."""

from contbatch.routers.least_tokens import LeastTokens
from contbatch.routers.power_of_two import PowerOfTwo
from contbatch.routers.prefix_affinity import PrefixAffinity
from contbatch.routers.round_robin import RoundRobin
from contbatch.routers.router import Loads, Router

__all__ = ["LeastTokens", "Loads", "PowerOfTwo", "PrefixAffinity", "RoundRobin", "Router"]

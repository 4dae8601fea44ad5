"""CUDA C++ without a build step: sources are compiled by NVRTC at first use and launched through the driver."""

"""The core: what runs next. A function of its calls, without clock, chance, threads or I/O."""

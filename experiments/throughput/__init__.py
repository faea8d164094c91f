"""Speed of engine, servers and gradients compared with other libraries."""

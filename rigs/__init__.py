"""What tests and benchmarks both need: servers, brokers, other machines, and waiting. It imports neither of them."""

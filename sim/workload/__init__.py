"""What is asked, and when: requests, iterations and gates, and what may be learned from."""

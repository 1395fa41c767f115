"""Record the routing of Hugging Face MoE models (`moesim record`); needs torch and transformers, imported when used."""

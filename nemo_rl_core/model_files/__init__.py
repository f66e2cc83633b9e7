"""Reading of transformers folders into models: full, sharded or quantized."""

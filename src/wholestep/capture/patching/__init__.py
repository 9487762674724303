"""What is replaced in torch and Python while a step is traced."""

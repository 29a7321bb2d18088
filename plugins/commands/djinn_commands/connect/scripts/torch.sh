# Asks the PyTorch of the environment `env` again, which was made before there was a GPU, or with another driver. `check`: as in environment.sh.
"$environment/bin/python" -I -c "$check" </dev/null >"$folder/env/torch.new"
mv "$folder/env/torch.new" "$folder/env/torch"
cat "$folder/env/torch"

# Sourced by setup.sh, lock.sh and install.sh: sets TORCH_SOURCE to uv's options for finding torch's CPU wheel.
# It lies in the folders that pip is told to look in (by PIP_FIND_LINKS or its configuration); on
# a machine where pip knows none, uv knows where PyTorch publishes it.
torch_source() {
  local folder folders
  # `pip config get` reads no file that PIP_CONFIG_FILE names; `list` does, with line breaks as \n.
  folders=${PIP_FIND_LINKS:-$("$1" -m pip config list 2> /dev/null |
    sed -n "s/^global.find-links='\(.*\)'\$/\1/p" | sed 's/\\n/ /g')}
  TORCH_SOURCE=()
  for folder in $folders; do
    TORCH_SOURCE+=(--find-links "$folder")
  done
  if [ ${#TORCH_SOURCE[@]} -eq 0 ]; then
    TORCH_SOURCE=(--torch-backend cpu)
  fi
}

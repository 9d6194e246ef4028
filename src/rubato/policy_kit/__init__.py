"""What policies share: building a batch, drafted trees and their worth, forecasts of KV, pools of replicas."""
